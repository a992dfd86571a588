"""Runs one node's ranks: it executes what the node machine decides, and reports what happens.

``runner`` executes the commands of ``core/node``. The other files are its parts: the zygote's client, process tree,
channels, files. You can read each of them alone. Features take part as a ``NodeSide``.
"""
