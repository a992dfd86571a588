"""What a trial has found: what one process may import for all ranks, and why the rest is imported in each."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict

from ddplaunch.dataclass import dataclass
from ddplaunch.files import read_regular
from ddplaunch.preload.question import Question

_FORMAT = 1
_MAX_BYTES = 4 << 20


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

    def holds(self, environ: Mapping[str, str] | None = None) -> bool:
        return all(_stamp(each.record) == each.stamp for each in self.distributions)


def key(question: Question) -> str:
    """The name of the file that has the verdict on a question, whatever its late modules are."""
    asked = {**asdict(question), "late": ()}
    words = json.dumps([_FORMAT, sys.executable, sys.version, sys.prefix, asked])
    return hashlib.sha256(words.encode()).hexdigest()[:32] + ".json"


def read(path: str) -> Verdict | None:
    """Return the verdict in a file; None where there is none, or something else."""
    try:
        found = json.loads(read_regular(path, _MAX_BYTES, links=False))
        return Verdict(
            modules=tuple(map(str, found["modules"])),
            excluded=tuple(Excluded(**each) for each in found["excluded"]),
            distributions=tuple(
                Distribution(each["name"], each["record"], tuple(each["stamp"]), each["sha256"])
                for each in found["distributions"]
            ),
            names=frozenset(map(str, found["names"])),
            tried=frozenset(map(str, found["tried"])),
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
