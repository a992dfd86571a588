"""The option ``--notify``."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

from typing import Annotated

from ddplaunch.cli.option_values import check_commands
from ddplaunch.core.options import Option, OptionGroup

# With two or three lines for an option, a group can be seen at once.
# fmt: off


class Notifications(OptionGroup, frozen=True):
    """Programs that run at events."""

    heading = "Sidecars, notifications and metrics"
    after = "sidecar"

    notify: Annotated[tuple[str, ...], Option("--notify COMMAND",
        "Run a program on node 0 at events like start, failure, stall and end, with JSON on stdin; "
        "may be repeated.", check_commands)] = ()
