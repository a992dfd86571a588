"""The options by which tests start ranks: forked by a zygote with few imports, or as new interpreters.

Torch takes the zygote over a second. Where neither torch nor the import is what a test is about, a zygote without it
forks all the same.
"""

import os

WARM = bool(os.environ.get("DDPLAUNCH_WARM"))
"""Whether all runs ask for a warm zygote: pytest's ``--warm`` (tests/suite/warm.py)."""

LIGHT = () if WARM else ("--preload", "threading")
"""For several ranks: a single one has no zygote, unless it is asked for. What is asked for by name is not kept warm."""

FORKED = ("--start", "zygote", *LIGHT)
EXEC = ("--start", "exec")
