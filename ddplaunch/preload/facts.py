"""What a file of Python source says that matters to its imports; ``where`` is in words, "train.py:3"."""

from __future__ import annotations

from enum import IntEnum

from ddplaunch.dataclass import dataclass


class Certainty(IntEnum):
    """How certainly, and when, a statement runs when its file does."""

    DEFERRED_CONDITIONAL = 0  # in a function, under a condition
    DEFERRED = 1  # in a function
    CONDITIONAL = 2  # under a condition
    IN_BLOCK = 3  # in a ``try``, a ``with`` and the like
    CERTAIN = 4

    def as_conditional(self) -> Certainty:
        return Certainty.DEFERRED_CONDITIONAL if self <= Certainty.DEFERRED else Certainty.CONDITIONAL

    def nested_in(self, outer: Certainty) -> Certainty:
        """Of a statement in a file that is itself read with ``outer``."""
        return outer.as_conditional() if self is Certainty.CONDITIONAL else min(self, outer)


@dataclass(frozen=True)
class Import:
    """``import module``, or ``from module import names``; ``level`` counts the dots of a relative one."""

    where: str
    certainty: Certainty
    module: str
    names: tuple[str, ...] = ()
    level: int = 0

    @property
    def top_level_name(self) -> str:
        return self.module.partition(".")[0]

    def modules(self, package: str) -> list[str]:
        """All that it may import, by their full names; ``package``: the one that its file is in."""
        above = package.split(".")[: package.count(".") + 2 - self.level] if self.level else []
        base = ".".join(filter(None, [*above, self.module]))
        return [base, *(f"{base}.{each}".strip(".") for each in self.names if each != "*")]


@dataclass(frozen=True)
class Assignment:
    """A variable of the environment is set.

    Attributes:
        name: None where the source does not show it.
        value: as the name; None also where the variable is removed, or set only sometimes.
        default: only where it is not set already.
        source: the import of what may set it when it is called with this name.
        after_torch: certainly after torch was imported, and so too late for what torch read then.
        before_imports: certainly before anything was imported that is not Python's own.
    """

    where: str
    certainty: Certainty
    name: str | None = None
    value: str | None = None
    default: bool = False
    source: Import | None = None
    after_torch: bool = False
    before_imports: bool = False

    @property
    def reason(self) -> str:
        return f"sets {self.name or 'variables'}"


@dataclass(frozen=True)
class SideEffect:
    """A statement that may do anything: no import, no function, no constant."""

    where: str
    certainty: Certainty


CALLS, CHANGES, PASSES, CONFIGURES = "calls", "changes", "passes on", "may configure the logger"


@dataclass(frozen=True)
class Use:
    """What others have made is called, changed, or given to others, whatever they do with it.

    Attributes:
        verb: which of these.
        target: what, by the names that lead there: "os.cpu_count".
        source: the import that brought it; of a logger: that of the module with its name.
    """

    where: str
    certainty: Certainty
    verb: str
    target: str
    source: Import

    @property
    def reason(self) -> str:
        return f"{self.verb} {self.target}"


@dataclass(frozen=True)
class PathEntry:
    """``sys.path`` gets another folder."""

    where: str
    certainty: Certainty
    path: str


@dataclass(frozen=True)
class Barrier:
    """From here on something decides that the source does not show; a ``hook`` changes how modules are found."""

    where: str
    certainty: Certainty
    reason: str
    hook: bool = False


Step = Import | Assignment | SideEffect | Use | Barrier
Statement = Step | PathEntry
