"""The option ``--preload``."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

from typing import Annotated

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Option, OptionGroup, Options
from ddplaunch.core.options import Starting, TargetOptions

# With two or three lines for an option, a group can be seen at once.
# fmt: off


class Preloading(OptionGroup, frozen=True):
    """What is imported before ranks are forked."""

    heading = "Starting ranks"
    after = "start"

    preload: Annotated[str | None, Option("--preload A,B",
        "Modules to import before forking: a list, auto (torch and packages known to be safe), torch or none.  "
        "[default: auto]")] = None

    def check_target(self, options: Options) -> None:
        for name in self.preload.split(",") if self.preload else ():
            if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
                what = f"--preload {self.preload}: {name!r} is not the name of a module"
                raise UsageError(what, "--preload torch,numpy")
        if options[Starting].start == "exec" and self.preload:
            raise UsageError("--preload does not work with --start exec", "leave one of them out")
        if self.preload and options[TargetOptions].no_python:
            what = "--preload does not work with --no-python: only Python can be forked"
            raise UsageError(what, "leave --preload out")
