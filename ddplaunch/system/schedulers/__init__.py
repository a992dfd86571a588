"""Batch jobs as their scheduler shows them: the records of submitted jobs, state, log, and job steps on the nodes.

``scheduler.Scheduler`` is the interface; ``features/submit`` has a file for each one.
"""
