"""Programs beside the ranks: ``--command … : train.py``, job files, ``--sidecar`` and ``--tensorboard``.

``machine.py`` decides for the programs of one node; ``node.py`` starts and stops them, through zygotes of their own.
``job.py`` decides for the programs of the whole job, on node 0.
"""
