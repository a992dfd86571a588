"""Coordination of the nodes of a job: joining, attempts, restarts, time limits.

``machine`` decides, with small parts: it gets events and returns commands (``job_events``), so a change can be tested
without processes. Features take part as a ``JobSide``.
"""
