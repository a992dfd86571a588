"""Inspection on node 0: before the ranks are stopped, for time limits, and to find the rank that others waited for.

It asks all nodes by ``rpc.py`` and judges with ``diagnosis/``.
"""
