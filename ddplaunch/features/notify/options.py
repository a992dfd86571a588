"""The option ``--notify``."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

import shlex
from typing import Annotated

from msgspec import Struct

from ddplaunch.base.options import Option, OptionGroup, Options
from ddplaunch.core.option_values import check_commands, find_program

# With two or three lines for an option, a group can be seen at once.
# fmt: off


class Notifications(OptionGroup, frozen=True):
    """Programs that run at events."""

    heading = "Sidecars, notifications and metrics"
    after = "sidecar"

    notify: Annotated[tuple[str, ...], Option("--notify COMMAND",
        "Run a program on node 0 at events like start, failure, stall and end, with JSON on stdin; "
        "may be repeated.", check_commands)] = ()
# fmt: on


class NotifyCommand(Struct, frozen=True):
    """A command of the user that is run on events."""

    argv: tuple[str, ...]
    path: str

    @property
    def command_text(self) -> str:
        return shlex.join(self.argv)


def read_commands(options: Options, *, is_remote: bool = False) -> tuple[NotifyCommand, ...]:
    """Return the commands of --notify; ``is_remote``: they run on another machine, so nothing can be checked here.

    Raises UsageError if a program does not exist.
    """
    commands = options[Notifications].notify
    return tuple(NotifyCommand(*find_program(text, "--notify", is_remote=is_remote)) for text in commands)
