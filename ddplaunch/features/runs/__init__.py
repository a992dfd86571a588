"""Runs and batch jobs: ``ps``, ``logs``, ``stop``, ``wait``, ``attach``, ``report``, ``clean``, and the history.

``history_recorder`` writes the events of a run, ``run_record`` builds its record from them; each command has a file.
``run_lookup`` and ``job_resolver`` find what a command names; ``time_breakdown`` has the categories of time, and
``goodput`` the words for them.
"""
