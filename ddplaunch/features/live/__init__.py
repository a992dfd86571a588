"""The live view of a job, in its own terminal (``run --ui``) or in another (``ddplaunch top``)."""
