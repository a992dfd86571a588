"""Inspection on one node: stacks, system calls, sockets and CPU time of its ranks; stalls and stragglers."""
