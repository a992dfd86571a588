"""The option ``--oom-report``."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

from typing import Annotated

from ddplaunch.base.options import Option, OptionGroup

# With two or three lines for an option, a group can be seen at once.
# fmt: off


class MemoryReport(OptionGroup, frozen=True):
    """The report when GPU memory is exhausted."""

    heading = "Debugging"
    after = "debugpy"

    oom_report: Annotated[bool, Option("--oom-report",
        "When CUDA runs out of memory, show the lines that allocated the largest blocks, and save a snapshot.")] = False
