"""The option ``--warm``."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

from typing import Annotated

from ddplaunch.base.options import Option, OptionGroup

# With two or three lines for an option, a group can be seen at once.
# fmt: off


class Warming(OptionGroup, frozen=True):
    """Whether the process that has imported torch is kept."""

    heading = "Starting ranks"
    after = "preload"

    warm: Annotated[bool | None, Option("--warm",
        "Keep the process that has imported torch for later runs, for 10 minutes.",
        off="--no-warm", envvar="DDPLAUNCH_WARM", in_user_file=True)] = None
