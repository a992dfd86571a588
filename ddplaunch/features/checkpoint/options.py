"""The option ``--checkpoint``."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

from typing import Annotated

from ddplaunch.base.options import Option, OptionGroup

# With two or three lines for an option, a group can be seen at once.
# fmt: off


class Checkpoints(OptionGroup, frozen=True):
    """The option that names the checkpoint files of the program."""

    heading = "Stopping and restarting"
    after = "min_uptime"

    checkpoint: Annotated[str | None, Option("--checkpoint PATTERN",
        "Checkpoint files, like 'ckpt/*'. When an attempt fails, work after the last one counts as lost.",
        completion="any", in_project=True)] = None
