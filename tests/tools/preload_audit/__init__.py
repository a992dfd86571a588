"""The audit of the table of known packages (``ddplaunch/features/preload/known.json``): a tool of the maintainers."""
