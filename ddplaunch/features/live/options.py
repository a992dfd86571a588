"""The option ``--ui``."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

from typing import Annotated

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Option, OptionGroup, Options
from ddplaunch.core.options import Output

# With two or three lines for an option, a group can be seen at once.
# fmt: off


class LiveDisplay(OptionGroup, frozen=True):
    """The live state below the output."""

    heading = "Output"
    after = "stdin"

    ui: Annotated[bool, Option("--ui",
        "Show the live state of the ranks below the output, like `ddplaunch top`.", is_local=True)] = False

    def check_contradictions(self, options: Options) -> None:
        if self.ui and (rank := options[Output].stdin) is not None:
            what = f"--ui does not work with --stdin {rank}: both read the keyboard"
            raise UsageError(what, "leave --ui out, and run ddplaunch top in another terminal")
