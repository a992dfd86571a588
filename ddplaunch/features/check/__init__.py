"""``--check``: verifies memory and GPUs of every node before ranks start.

``machine_check`` has the rules, ``node.py`` runs them on a node. How node 0 waits for the nodes need not be read.
"""
