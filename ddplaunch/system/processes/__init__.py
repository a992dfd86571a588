"""Processes and the kernel: children, descendants, signals and limits of processes, for every part of ddplaunch.

``proc_utils`` runs in zygotes and ranks too, so it imports the standard library alone. Each file can be read by itself.
"""
