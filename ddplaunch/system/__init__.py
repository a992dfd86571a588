"""What exists on this machine and what will run: targets, plans, clusters, devices, schedulers. No job, no feature.

Each subpackage can be read and changed without the others. Most of it is pure, or reads files and variables; nothing
starts ranks.
"""
