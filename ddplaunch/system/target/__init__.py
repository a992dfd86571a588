"""What to run: found and checked without running any of it."""
