"""``--check``: verifies memory and GPUs of every node before ranks start.

``node.py`` starts the check on a node, ``machine_check.py`` is what runs; the coordinator collects the results
(``core/job/node_checks.py``).
"""
