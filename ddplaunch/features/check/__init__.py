"""``--check``: verifies memory and GPUs of every node before ranks start.

``node.py`` runs the check on a node, ``job.py`` collects the results on node 0.
"""
