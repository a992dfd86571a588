"""What the files of a program said when they were read last, kept as long as they are the same: parsing takes a while.

A file of its own for each program, in the folder of ``cache``.
"""

from __future__ import annotations

import json
import os

from ddplaunch.errors import UsageError
from ddplaunch.files import read_regular
from ddplaunch.preload import cache
from ddplaunch.preload.digest import digest
from ddplaunch.preload.facts import Assignment, Doubt, Finding, Import, Reach, Seeding
from ddplaunch.target import source

_FORMAT = 2
_MAX_PARSED = 256 << 10  # bytes of modules in one run: they take some 50 ms
_MAX_FILE = 2 << 20  # bytes of one that is parsed at all
_MAX_BYTES = 8 << 20  # of what is kept

Said = tuple[tuple[Finding, ...], bool]
"""What a file says, and whether it seems to use what imports ``torch._dynamo``."""


class Scans:
    """Those of one program, known by its own file."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._known: dict[str, tuple[list[int], Said]] | None = None  # read when there is a second file
        self._kept: dict[str, tuple[list[int], Said]] = {}
        self._parsed = 0
        self.complete = True  # False once a file was not read, because others were too large

    def of(self, file: str) -> Said:
        """Read a file, or remember it; one that cannot be read says nothing."""
        if file == self._program:
            return _read(file)  # which has been parsed already, to find the target
        try:
            found = os.stat(file)
        except OSError:
            return (), False
        stamp = [found.st_ino, found.st_size, found.st_mtime_ns]
        if self._known is None:
            self._known = self._load()
        known = self._known.get(file)
        if known is None or known[0] != stamp:
            if found.st_size > _MAX_FILE or (self._parsed and self._parsed + found.st_size > _MAX_PARSED):
                self.complete = False
                return (), False
            self._parsed += found.st_size
            known = (stamp, _read(file))
        self._kept[file] = known
        return known[1]

    def keep(self) -> None:
        """Write down what was not known before."""
        if self._kept != (self._known or {}):
            content = {
                file: [stamp, [_packed(each) for each in said], dynamo]
                for file, (stamp, (said, dynamo)) in self._kept.items()
            }
            cache.write(self._name(), json.dumps([_FORMAT, content]))

    def _name(self) -> str:
        return digest(os.fsencode(self._program))[:32] + ".scan"

    def _load(self) -> dict[str, tuple[list[int], Said]]:
        try:
            number, content = json.loads(cache.read(self._name(), _MAX_BYTES))
            if number != _FORMAT:
                return {}
            return {
                str(file): (stamp, (tuple(map(_unpacked, said)), bool(dynamo)))
                for file, (stamp, said, dynamo) in content.items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}


def _read(file: str) -> Said:
    from ddplaunch.preload.scan import needs_dynamo, scan

    try:
        text = read_regular(file, source.MAX_SOURCE).decode(errors="replace")
        return scan(source.parse(file), text), needs_dynamo(text)
    except (OSError, UsageError):  # what imports it shows that
        return (), False


_KINDS = {"import": Import, "set": Assignment, "doubt": Doubt, "seed": Seeding}


def _packed(finding: Finding) -> list[object]:
    kind = next(name for name, kind in _KINDS.items() if isinstance(finding, kind))
    return [kind, *(getattr(finding, name) for name in finding.__match_args__)]


def _unpacked(packed: list[object]) -> Finding:
    match packed:
        case ["import", int(line), int(reach), str(module), [*names], int(level)]:
            return Import(line, Reach(reach), module, tuple(map(str, names)), level)
        case ["set", int(line), int(reach), (str() | None) as name, (str() | None) as value, bool(default)]:
            return Assignment(line, Reach(reach), name, value, default)
        case ["doubt", int(line), str(words)]:
            return Doubt(line, words)
        case ["seed", int(line), int(reach)]:
            return Seeding(line, Reach(reach))
    raise ValueError(packed)
