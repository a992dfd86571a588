"""What a file of Python source says that matters to whoever imports for it: imports, variables set, doubts, seeds."""

from __future__ import annotations

from enum import IntEnum

from ddplaunch.dataclass import dataclass


class Reach(IntEnum):
    """How certainly a statement runs when its file does."""

    MAYBE = 0  # in a function, or under a condition
    TRIED = 1  # in a ``try``, a ``with`` and the like
    SURE = 2


@dataclass(frozen=True)
class Import:
    """``import module``, or ``from module import names``; ``level`` counts the dots of a relative one."""

    line: int
    reach: Reach
    module: str
    names: tuple[str, ...] = ()
    level: int = 0


@dataclass(frozen=True)
class Assignment:
    """A variable of the environment is set; ``default``: where it is not set already."""

    line: int
    reach: Reach
    name: str | None  # None where the source does not show it
    value: str | None  # as the name; or it is removed
    default: bool = False


@dataclass(frozen=True)
class Doubt:
    """The program changes how, or what, it imports: in words, "changes sys.path"."""

    line: int
    words: str


@dataclass(frozen=True)
class Seeding:
    """A random generator is given a state."""

    line: int
    reach: Reach


Finding = Import | Assignment | Doubt | Seeding
