"""Addresses and ports of this machine, without a connection to another.

How nodes connect is in ``core/net``.
"""
