"""The option ``--code``."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

from typing import Annotated

from ddplaunch.base.options import Option, OptionGroup

# With two or three lines for an option, a group can be seen at once.
# fmt: off


class Code(OptionGroup, frozen=True):
    """The option for the code that is copied to the nodes."""

    heading = "Several nodes by SSH"
    after = "remote_python"

    code: Annotated[str | None, Option("--code DIR",
        "Copy this folder, without what git ignores, to the hosts, and run the copy.", completion="folder",
        is_local=True, has_variable=False)] = None
