"""Programs beside the ranks: ``--sidecar`` and ``--tensorboard``.

``machine.py`` decides for the programs of one node; ``node.py`` starts and stops them, by zygotes of their own.
"""
