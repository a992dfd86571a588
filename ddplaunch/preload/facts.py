"""What a file of Python source says that matters to whoever imports for it."""

from __future__ import annotations

from enum import IntEnum

from ddplaunch.dataclass import dataclass


class Reach(IntEnum):
    """How certainly, and when, a statement runs when its file does."""

    SELDOM = 0  # in a function, under a condition
    LATER = 1  # in a function
    MAYBE = 2  # under a condition
    TRIED = 3  # in a ``try``, a ``with`` and the like
    SURE = 4

    def under_condition(self) -> Reach:
        return Reach.SELDOM if self <= Reach.LATER else Reach.MAYBE

    def within(self, outer: Reach) -> Reach:
        """Of a statement in a file that is itself read with ``outer``."""
        return outer.under_condition() if self is Reach.MAYBE else min(self, outer)


# Where a statement stands is in words: "train.py:3".


@dataclass(frozen=True)
class Import:
    """``import module``, or ``from module import names``; ``level`` counts the dots of a relative one."""

    where: str
    reach: Reach
    module: str
    names: tuple[str, ...] = ()
    level: int = 0

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def modules(self, package: str) -> list[str]:
        """All that it may import, by their full names; ``package``: the one that its file is in."""
        base, above = self.module, package.split(".") if package else []
        if self.level:
            base = ".".join([*above[: len(above) - self.level + 1], *([base] if base else [])])
        return [base, *(f"{base}.{each}" if base else each for each in self.names if each != "*")]


@dataclass(frozen=True)
class Assignment:
    """A variable of the environment is set.

    Attributes:
        name: None where the source does not show it.
        value: as the name; None also where the variable is removed, or set only sometimes.
        default: only where it is not set already.
        after: certainly after torch was imported, and so too late for what torch read then.
        early: certainly before anything was imported that is not Python's own.
    """

    where: str
    reach: Reach
    name: str | None
    value: str | None
    default: bool = False
    after: bool = False
    early: bool = False


@dataclass(frozen=True)
class Effect:
    """A statement that may do anything: no import, no function, no constant."""

    where: str
    reach: Reach


@dataclass(frozen=True)
class Patch:
    """What others have made may be changed.

    Attributes:
        target: what, by the names that lead there: "os.cpu_count".
        source: the import that brought it; None where that makes no difference.
        passed: it is a module that is given to others, whatever they do with it.
    """

    where: str
    reach: Reach
    target: str
    source: Import | None = None
    passed: bool = False

    @property
    def words(self) -> str:
        return f"passes {self.target} on" if self.passed else f"changes {self.target}"


@dataclass(frozen=True)
class Use:
    """Something is called that an import has brought: another's code runs.

    Attributes:
        source: the import.
        variables: names in the call that may be those of variables; None for one that the source does not show.
    """

    where: str
    reach: Reach
    source: Import
    variables: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class Logger:
    """The program asks for a logger by this name (empty: of a loop), perhaps to configure it before its import does."""

    where: str
    reach: Reach
    name: str

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    @property
    def words(self) -> str:
        return f"may configure the logger {self.name}" if self.name else "may configure any logger"


@dataclass(frozen=True)
class Folder:
    """``sys.path`` gets another folder."""

    where: str
    reach: Reach
    path: str


@dataclass(frozen=True)
class Barrier:
    """From here on something decides that the source does not show: in words, "calls exec".

    ``hook``: it changes how modules are found and made.
    """

    where: str
    reach: Reach
    words: str
    hook: bool = False


Step = Import | Assignment | Effect | Patch | Barrier | Use | Logger
Finding = Step | Folder
