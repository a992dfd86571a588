"""``python -m tests.diagrams``: the pictures of docs/ that are taken of real runs, and that of the package."""
