"""``ddplaunch profile``: samples where the ranks of a running job spend their time."""
