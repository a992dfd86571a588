"""The statements of a source file that matter to preloading, as data; ``where`` is file and line: "train.py:3"."""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct


class Certainty(IntEnum):
    """How certainly, and when, a statement runs if its file is executed."""

    DEFERRED_CONDITIONAL = 0  # in a function, under a condition
    DEFERRED = 1  # in a function
    CONDITIONAL = 2  # under a condition
    IN_BLOCK = 3  # in a ``try``, a ``with`` and the like
    CERTAIN = 4

    def as_conditional(self) -> Certainty:
        return Certainty.DEFERRED_CONDITIONAL if self <= Certainty.DEFERRED else Certainty.CONDITIONAL

    def nested_in(self, outer: Certainty) -> Certainty:
        """Return the certainty of a statement in a file whose own import has the certainty ``outer``."""
        return outer.as_conditional() if self is Certainty.CONDITIONAL else min(self, outer)


class SourceLine(Struct, frozen=True):
    """Where a statement is, and how certainly it runs."""

    where: str
    certainty: Certainty


class Import(SourceLine, frozen=True):
    """``import module``, or ``from module import names``; ``level``: the number of dots of a relative import."""

    module: str
    names: tuple[str, ...] = ()
    level: int = 0

    @property
    def top_level_name(self) -> str:
        return self.module.partition(".")[0]

    def modules(self, package: str) -> list[str]:
        """The full names of all modules that it may import; ``package``: the package of its file."""
        above = package.split(".")[: package.count(".") + 2 - self.level] if self.level else []
        base = ".".join(filter(None, [*above, self.module]))
        return [base, *(f"{base}.{each}".strip(".") for each in self.names if each != "*")]


class Assignment(SourceLine, frozen=True):
    """Sets an environment variable.

    Attributes:
        name: None if the source does not show it.
        value: None if the source does not show it, or if the variable is removed, or set only sometimes.
        default: sets it only if it is not set already (``setdefault``).
        source: of a call with this name as an argument, which may set it: the import of the function.
        after_torch: runs certainly after torch was imported: too late for what torch reads at its import.
        before_imports: runs certainly before any import from outside the standard library.
    """

    name: str | None = None
    value: str | None = None
    default: bool = False
    source: Import | None = None
    after_torch: bool = False
    before_imports: bool = False

    @property
    def reason(self) -> str:
        return f"sets {self.name or 'variables'}"


class SideEffect(SourceLine, frozen=True):
    """A statement that may have any effect: no import, no definition of a function, no constant."""


CALLS, CHANGES, PASSES, CONFIGURES = "calls", "changes", "passes on", "may configure the logger"


class Use(SourceLine, frozen=True):
    """Uses an imported object in a way that may change it: calls it, assigns to it, or passes it on.

    Attributes:
        verb: how it is used.
        target: the qualified name of the object: "os.cpu_count".
        source: the import that it came from; of a logger: an import of the module with its name.
    """

    verb: str
    target: str
    source: Import

    @property
    def reason(self) -> str:
        return f"{self.verb} {self.target}"


class PathEntry(SourceLine, frozen=True):
    """Adds a folder to ``sys.path``."""

    path: str


class Barrier(SourceLine, frozen=True):
    """May change later imports in a way that the source does not show; ``hook``: changes how modules are found."""

    reason: str
    hook: bool = False


Step = Import | Assignment | SideEffect | Use | Barrier
Statement = Step | PathEntry
