"""The list of the features of ddplaunch. Each feature is a folder or a module, above all layers.

A folder holds all sides of its feature: what it adds to ddplaunch (``feature.py``), its options (``options.py``) and
command (``command.py``), its part in the launcher (``node.py``), on node 0 (``job.py``) and in the user's processes
(``rank/``, standard library only), its requests on the control socket (``request.py``) and to all nodes (``rpc.py``),
its control messages (``messages.py``). To change a feature, read ``core/feature.py`` and its folder.
"""

FEATURES = (
    "code",
    "ssh",
    "preload",
    "check",
    "stacks",
    "memory",
    "runs",
    "nccl",
    "live",
    "debug",
    "profile",
    "torch_debug",
    "metrics",
    "reservations",
    "programs",
    "notify",
    "checkpoint",
    "doctor",
    "submit",
    "manifest",
    "kubernetes",
    "devices",
    "slurm_step",
    "warm",
    "python",
)
"""Modules, or folders with a ``feature.py``, in order: a feature follows those that it requires."""

OBSERVE = {"inspect": "ddplaunch.observe.feature", "samples": "ddplaunch.observe.samples.feature"}
"""What the layer ``observe`` adds to ddplaunch in the same way. Features use it, so it cannot be deleted."""
