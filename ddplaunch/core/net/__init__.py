"""Connections between the nodes of a job: handshake, heartbeats, clock offsets, authentication.

``link`` connects a node to node 0: in another process (``coordinator_client``), or in this one
(``coordinator_server``). When to connect, and what the loss of node 0 means, is decided by ``link_machine``; decisions
about the job are in ``core/job``.
"""
