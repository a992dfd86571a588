"""The control socket of a running job: its server, and the job's status.

``cli/client.py`` sends a ``request.Request``, ``server`` passes it to its handler in the launcher. A request that
belongs to a feature is in that feature's ``request.py``. Handlers use ``request.ServedJob``.
"""
