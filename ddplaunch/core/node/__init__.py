"""One node's part of a job: it starts, watches, stops and explains the ranks on this machine.

``supervisor`` decides and holds the other objects; the rest are effects: the zygote's client, signals, process tree,
files, limits. Decisions about the whole job are in ``core/job``, the zygote's own side in ``core/rank``; features need
not be read: their parts are ``NodeSide``.
"""
