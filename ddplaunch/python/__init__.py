"""ddplaunch from Python: functions in, results out; ``ddplaunch`` itself has the names (docs/python.md)."""
