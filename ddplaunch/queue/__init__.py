"""A job in a scheduler's queue, seen from outside: which it is, how it stands, its log, a step on its nodes."""
