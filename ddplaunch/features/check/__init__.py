"""``--check``: verifies memory and GPUs of every node before ranks start.

``node.py`` runs the check on a node; the coordinator collects the results (``core/job/node_checks.py``).
"""
