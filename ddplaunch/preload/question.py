"""What a program wants imported, as its source says: the question that a trial answers."""

from __future__ import annotations

from ddplaunch.dataclass import dataclass


@dataclass(frozen=True)
class Statement:
    """One import statement of the program: ``import module``, or ``from module import names``."""

    module: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """A variable that the program sets, for itself and what it imports."""

    name: str
    value: str | None  # None where the source does not show it, or sets it only sometimes


@dataclass(frozen=True)
class Question:
    """What is to be tried.

    Attributes:
        statements: what the program and its own modules import of others, in their order, torch among it.
        settings: all variables that the program sets itself, before or after its imports.
        sets_unseen: it may set others, whose names the source does not show.
        late: what the last good run had imported by its end beyond that, in its order.
        seeds_first: it may seed a random generator before its imports are done: what an import draws then counts.
    """

    statements: tuple[Statement, ...]
    settings: tuple[Setting, ...] = ()
    sets_unseen: bool = False
    late: tuple[str, ...] = ()
    seeds_first: bool = True
