"""Detects nodes of a Slurm step that ended before they joined the job."""
