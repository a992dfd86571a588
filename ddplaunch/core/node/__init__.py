"""One node's part of a job: it starts, watches, stops and explains the ranks on this machine.

``supervisor`` decides and holds the other objects; the rest are effects: the zygote's client, signals, process tree,
files, limits. Decisions about the whole job are in ``core/job``.
"""
