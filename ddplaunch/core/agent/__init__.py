"""Runs one node's ranks: it executes what the node machine decides, and reports what happens.

``runner`` executes the commands of ``core/node``; the rest are its parts: the zygote's client, process tree, channels,
files. Each can be read alone, when it is the one that you change. Features take part as a ``NodeSide``.
"""
