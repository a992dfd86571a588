"""What runs inside the user's processes: standard library only, for user code must not trip over anything else."""
