"""Diagnostics of one or many machines: facts of each, tests between them, and the findings."""
