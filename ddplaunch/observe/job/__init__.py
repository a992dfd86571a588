"""Inspection on node 0: before the ranks are stopped, for time limits, and to find the rank that others waited for.

It requests inspections from all nodes by ``rpc.py``, and draws conclusions with ``diagnosis/``.
"""
