"""Diagnostics of one or many machines: facts of each, tests between them, and the findings.

``checks/`` has a file for each subject; ``examination`` runs them on all machines, ``findings`` and ``report`` show the
result. It runs without a job.
"""
