"""``--sidecar`` and ``--tensorboard``: programs that run alongside the ranks on node 0.

``node.py`` starts and stops them by a zygote of their own.
"""
