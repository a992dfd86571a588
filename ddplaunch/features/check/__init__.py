"""``--check``: verifies memory and GPUs of every node before ranks start.

``machine_check`` has the rules, ``node.py`` runs them on a node.
"""
