"""The control socket of a running job: its server, its client, the job's status, and core's requests.

A request that belongs to a feature is in that feature's ``request.py``.
"""
