"""Inspection on node 0: before the ranks are stopped, for time limits, and which rank the others waited for.

It asks all nodes by ``rpc.py`` and judges with ``diagnosis/``.
"""
