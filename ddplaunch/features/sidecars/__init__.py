"""``--sidecar`` and ``--tensorboard``: programs that run beside the ranks on node 0."""
