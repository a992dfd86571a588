"""Coordination of the nodes of a job: joining, attempts, restarts, time limits.

Read ``machine`` first: it decides, and begins with its rules. ``job_events`` and ``commands`` are its input and output,
``attempt_machine`` is its part for one attempt. The others are small parts of both, which return commands too. Features
take part as a ``JobSide``.
"""
