"""Handing a job to a scheduler: what it is told, and how its jobs are followed."""
