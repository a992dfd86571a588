"""What the imports of modules have read and changed outside these modules, as ``import_recorder`` records it."""

from __future__ import annotations

import marshal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    ExitHandler = tuple[Callable[..., object], tuple[object, ...], Mapping[str, object]]
    """A function with its arguments."""


class Inputs:
    """What the import of one module, or of several, has read outside these modules."""

    def __init__(self) -> None:
        self.asked: set[str] = set()  # the top-level names that were searched for, also in vain
        self.distributions: set[str] = set()  # whose metadata were searched for; "" is all of them
        self.files: set[str] = set()  # paths outside the installation that were opened or examined
        self.prefixes: set[str] = set()  # all variables with one of these are read
        self.handlers: dict[str, bool] = {}  # whether loggers had handlers
        self.levels: dict[tuple[str, int], bool] = {}  # whether loggers were enabled for a level
        self.marks: set[str] = set()  # WARNED and MOVES_RANDOM
        self.variables: dict[str, str | None] = {}  # that Python code has read, with their first values

    def pack(self) -> bytes:
        """Pack the inputs into one bytes object: each Python object that a rank reads makes it copy a memory page."""
        return marshal.dumps([(kind, found) for kind, found in self.__dict__.items() if found])

    def add(self, packed: bytes) -> None:
        """Add the packed inputs of a module that was loaded after the earlier ones."""
        for kind, effects in marshal.loads(packed):
            if kind == "variables":
                effects.update(self.variables)
                self.variables = effects
            else:
                self.__dict__[kind].update(effects)


WARNED = "warned"
"""Marks a module whose import has emitted a warning, shown or not."""

MOVES_RANDOM = "moves random"
"""Marks a module whose import has taken a number from the generator of the module random."""


class Changes:
    """What the import of one module has changed outside the module itself; it is redone in a rank."""

    def __init__(self) -> None:
        self.variables: dict[str, tuple[str | None, str | None]] = {}  # values before and after
        self.lists: list[tuple[str, list[Any], list[Any]]] = []  # with their items before and after
        self.loggers: dict[str, Any] = {}  # those that it has made, by name
        self.exits: list[ExitHandler] = []  # what it has registered with atexit


def is_stdlib(name: str) -> bool:
    """Whether a module is of the standard library."""
    return name.partition(".")[0] in sys.stdlib_module_names
