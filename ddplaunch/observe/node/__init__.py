"""Inspection on one node: stacks, system calls, sockets and CPU time of its ranks; stalls and stragglers.

``inspect_side`` creates the other parts. ``rank_inspector`` queries the ranks, as ``inspection_machine`` decides.
"""
