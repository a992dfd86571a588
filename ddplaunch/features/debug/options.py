"""The options of the debugger: ``--debug`` and others."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

from importlib.util import find_spec
from typing import Annotated

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.options import Option, OptionGroup
from ddplaunch.core.option_values import time_limit

# With two or three lines for an option, a group can be seen at once.
# fmt: off


class Debugging(OptionGroup, frozen=True):
    """Breakpoints and debuggers."""

    heading = "Debugging"
    after = "metrics"

    debug: Annotated[bool, Option("--debug",
        "Stop ranks at breakpoints until `ddplaunch debug` attaches, also without a terminal.")] = False
    debug_timeout: Annotated[float, Option("--debug-timeout TIME",
        "Resume a rank in the debugger after this long without input.", time_limit)] = 3600.0
    post_mortem: Annotated[bool, Option("--post-mortem",
        "Enter the debugger at the exception of the first rank that fails.")] = False
    debugpy: Annotated[str | None, Option("--debugpy RANKS",
        "Ranks to which an editor on this machine can attach with debugpy, like 0,3.")] = None

    def debugpy_ranks(self) -> frozenset[int]:
        """Parse the ranks of ``--debugpy``; raises UsageError."""
        if self.debugpy is None:
            return frozenset()
        if not all(part.strip().isdecimal() for part in self.debugpy.split(",")):
            raise UsageError(f"--debugpy {sanitize_line(self.debugpy, 60)}: expected ranks", "--debugpy 0,3")

        if find_spec("debugpy") is None:
            raise UsageError("--debugpy needs debugpy, which is not installed", "pip install debugpy")
        return frozenset(map(int, self.debugpy.split(",")))
