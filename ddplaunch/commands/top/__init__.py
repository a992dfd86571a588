"""``ddplaunch top``: what a running job does, as it runs."""
