"""``python -m tests.pictures``: the pictures of docs/ that are taken of real runs, and that of the package."""
