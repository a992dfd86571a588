"""What exists on this machine and what will run: targets, plans, clusters, devices, network, schedulers. No job.

Each subpackage can be read without the others. Most of it is pure, or reads files and variables; nothing starts ranks.
"""
