"""Finds what the word RUN of a command line names. The first of these that matches is taken:

1. a job that was started here on other hosts, unless a run of this machine matches too: the command runs on the first
   of them (``job_command``, by ``remote_jobs``);
2. a job of a batch scheduler: the command runs on its node 0, or is about the job, even if the job waits or has ended
   (``batch_jobs``; ``job_arrays`` and ``queued_jobs`` query the state of several);
3. a run of this machine (``run_index``): the newest with this run id; the one with this name, or whose launcher has
   this PID; the only one whose name begins with the word, else contains it; the newest of the batch job with this id.
   A command about a running job looks among those with a control socket (``running_jobs``), others in the history too.

Without a word the only run in progress is meant, or, where a run may have ended, the newest of the current folder
(``default_run``). A feature that starts jobs on other hosts adds a ``RunLocator``; one that has a batch scheduler, its
``Scheduler``.
"""
