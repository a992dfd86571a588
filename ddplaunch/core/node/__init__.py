"""Decides for one node of a job: when its ranks start and stop, and how their ends are explained. Without I/O.

Read ``machine`` first: it begins with its rules. ``node_events`` and ``commands`` are its input and output,
``attempt_machine`` is its part for one attempt, ``node_attempt`` has the data of an attempt, ``signals`` remembers
signals. ``core/agent`` executes the commands.

Decisions about the whole job are in ``core/job``, the zygote's own side in ``core/rank``.
"""
