"""What a trial has found: what one process may import for all ranks, and why the rest is imported in each."""

from __future__ import annotations

from ddplaunch.dataclass import dataclass


@dataclass(frozen=True)
class Excluded:
    """What is imported in each rank."""

    name: str  # of the package or module
    reason: str  # in words: "makes a temporary folder at import"


@dataclass(frozen=True)
class Distribution:
    """An installed distribution as it was tried; an editable one never is."""

    name: str
    record: str  # the path of its RECORD
    stamp: tuple[int, int, int]  # the file's inode, bytes and mtime_ns: while they are the same, so is what it says
    sha256: str  # of the file


@dataclass(frozen=True)
class Verdict:
    """The answer to a question; it holds while all distributions are as they were.

    Attributes:
        modules: what to import, in this order, torch among it.
        names: the top-level modules that this loads; a file of the user's that has one of these names is not to be
            hidden by it.
        tried: those of the question's late modules that were tried, whatever came of it.
    """

    modules: tuple[str, ...]
    excluded: tuple[Excluded, ...]
    distributions: tuple[Distribution, ...]
    names: frozenset[str]
    tried: frozenset[str]
