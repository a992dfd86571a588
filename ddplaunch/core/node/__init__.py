"""One node's part of a job: it starts, watches, stops and explains the ranks on this machine.

Read ``machine`` first: it decides, and begins with its rules. ``node_events`` and ``commands`` are its input and
output, ``node_attempt`` is what it knows. ``runner`` executes the commands; the rest are effects: the zygote's client,
process tree, channels, files. Each can be read alone, when it is the one that you change.

Decisions about the whole job are in ``core/job``, the zygote's own side in ``core/rank``. Features take part as a
``NodeSide``.
"""
