"""The features of ddplaunch: a folder each, above the core, and the list of them.

A folder holds all sides of its feature: what it adds to ddplaunch (``feature.py``), its options (``options.py``) and
command (``command.py``), its part in the launcher (``node.py``), on node 0 (``job.py``) and in the user's processes
(``rank/``, standard library only), its requests on the control socket (``request.py``) and to all nodes (``rpc.py``),
its control messages (``messages.py``). To change a feature, read ``core/feature.py`` and its folder.
"""

FEATURES = (
    "ssh",
    "preload",
    "check",
    "inspect",
    "samples",
    "memory",
    "runs",
    "live",
    "debug",
    "profile",
    "metrics",
    "programs",
    "notify",
    "checkpoint",
    "doctor",
    "submit",
    "manifest",
    "devices",
    "slurm_step",
    "warm",
)
"""Folders with a ``feature.py``, in order: a feature follows those that it requires."""
