"""What the imports of modules have done outside these modules, as ``import_recorder`` records it."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any

    ExitHandler = tuple[Callable[..., object], tuple[object, ...], Mapping[str, object]]
    """A function with its arguments."""


class Effects:
    """What the import of one module has done outside the module itself."""

    __slots__ = (
        *("asked", "distributions", "exits", "files", "handlers", "levels"),
        *("lists", "loaded", "loggers", "moves_random", "prefix", "reads", "variables", "warned"),
    )

    def __init__(self) -> None:
        self.loaded: dict[str, None] = {}  # the modules that it has imported, whether they were new or not
        self.asked: set[str] = set()  # the top-level names that were searched for, also in vain
        self.distributions: set[str] = set()  # whose metadata were searched for; "" is all of them
        self.reads: dict[str, str | None] = {}  # environment variables that Python code has read, with their values
        self.prefix = ""  # all variables with this prefix are read; "": none
        self.files: set[str] = set()  # paths outside the installation that were opened or examined
        self.levels: dict[tuple[str, int], bool] = {}  # whether loggers were enabled for a level
        self.handlers: dict[str, bool] = {}  # whether loggers had handlers
        self.variables: dict[str, tuple[str | None, str | None]] = {}  # changed: values before and after
        self.lists: list[tuple[str, list[Any], list[Any]]] = []  # lists that it has changed, with their items
        self.loggers: dict[str, Any] = {}  # those that it has made, by name
        self.warned = False  # it has emitted a warning, shown or not
        self.moves_random = False  # it has taken a number from the generator of the module random
        self.exits: list[ExitHandler] = []  # what it has registered with atexit

    @property
    def has_changes(self) -> bool:
        """Whether it has changed something that is redone in a rank."""
        return bool(self.variables or self.lists or self.loggers or self.exits)


class ImportSummary:
    """What the imports of several modules have done that are handed over together.

    Made in the zygote where possible: to look at a Python object in a rank copies the memory page that it is in.
    """

    def __init__(self, new: list[str], effects: Mapping[str, Effects], native: Collection[str]) -> None:
        """``new``: the modules in the order of their loading; ``native``: all those in native code."""
        self.new = new
        all_effects = [effects[each] for each in new if each in effects]
        own = [each for each in new if not is_stdlib(each)]
        self.packages = frozenset(own)  # those outside the standard library
        self.native = frozenset(each for each in new if each in native)
        self.changing = frozenset(each for each in new if each in effects and effects[each].has_changes)
        self.asked = frozenset[str]().union(*(each.asked for each in all_effects))
        self.distributions = frozenset[str]().union(*(each.distributions for each in all_effects))
        self.used = frozenset[str]().union(*(each.loaded for each in all_effects))
        self.files = frozenset[str]().union(*(each.files for each in all_effects))
        self.warned = any(each.warned for each in all_effects)
        self.loggers = {name: logger for each in all_effects for name, logger in each.loggers.items()}
        self.levels = {key: enabled for each in all_effects for key, enabled in each.levels.items()}
        self.handlers = {name: found for each in all_effects for name, found in each.handlers.items()}
        self.moves_random = any(each.moves_random for each in all_effects)
        others = [effects[each] for each in own if each in effects and each.partition(".")[0] != "torch"]
        self.uses_torch = any("torch" in each.loaded for each in others)
        self.variables: dict[str, str | None] = {}  # that they read, with the values before their own changes
        for each in all_effects:
            for name, (before, _) in each.variables.items():
                self.variables.setdefault(name, before)
        for each in all_effects:
            for name, value in each.reads.items():
                self.variables.setdefault(name, value)
        self.prefixes = tuple(filter(None, (each.prefix for each in all_effects)))
        self.present = frozenset(name for name, value in self.variables.items() if value is not None)


def is_stdlib(name: str) -> bool:
    """Whether a module is of the standard library."""
    return name.partition(".")[0] in sys.stdlib_module_names
