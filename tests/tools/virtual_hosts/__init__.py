"""Virtual hosts: several machines with a network between them, made of Linux namespaces, for tests with faults.

Tests use the fixture ``network``; ``network.Network`` is a switch with hosts, ``host.Host`` one of them. A host is one
process, ``init.py``, in namespaces of its own, and its network namespace is kept by an open file of the test process,
not in ``/run/netns``: nothing is left however the test process ends.
"""
