"""Virtual hosts: several machines with a network between them, made of Linux namespaces, for tests that break things.

``fixture.network`` is what tests ask for; ``network.Network`` is a switch with hosts, ``host.Host`` one of them. A host
is one process, ``init.py``, in namespaces of its own, and a network namespace is held by an open file of the test
process: nothing lies in ``/run/netns``, and whatever way the test process ends, nothing is left.
"""
