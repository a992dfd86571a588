"""ddplaunch from Python: ``launch``, ``Session``, notebooks and the pytest plugin (docs/python.md).

``ddplaunch`` exports the public names. ``rank/`` runs in the ranks. A job is a child process, ``ddplaunch run``.
"""
