"""What would break a job on some machines, or slow it: facts of each, tests between them, and what both mean."""
