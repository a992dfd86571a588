"""The audit of the table of known packages (``ddplaunch/preload/known.json``): a tool of the maintainers."""
