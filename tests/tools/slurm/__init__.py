"""A real Slurm on this machine, for the tests in tests/slurm."""
