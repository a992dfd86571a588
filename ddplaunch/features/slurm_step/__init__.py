"""Detects nodes of a Slurm step that ended before they joined the job.

Node 0 asks Slurm while it waits.
"""
