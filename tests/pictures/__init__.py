"""``python -m tests.pictures``: the pictures of docs/ that show a terminal, taken of real runs."""
