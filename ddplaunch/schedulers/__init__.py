"""Getting onto many machines: what is asked of a scheduler, and how its jobs are followed."""
