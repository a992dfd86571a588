"""``--notify``: runs a command on each event of the job.

``rank/notifier.py`` is the process that runs the commands; ``node.py`` sends it the events (``core/events.py``).
"""
