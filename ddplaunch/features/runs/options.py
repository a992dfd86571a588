"""The option ``--no-history``."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

from typing import Annotated

from ddplaunch.base.options import Option, OptionGroup

# With two or three lines for an option, a group can be seen at once.
# fmt: off


class History(OptionGroup, frozen=True):
    """Whether the run is recorded."""

    heading = "Output"
    after = "log_json"

    no_history: Annotated[bool, Option("--no-history",
        "Do not record this run for `ddplaunch ps`, `logs` and `report`.", in_project=True)] = False
