"""Inspection on one node: stacks, system calls, sockets and CPU time of its ranks; stalls and stragglers.

``inspect_side`` holds the others, ``rank_inspector`` asks the ranks; what it asks, ``inspection_machine`` decides.
"""
