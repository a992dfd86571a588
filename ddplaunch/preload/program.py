"""What a program's own files say of its imports and all that matters to them, in the order in which it would run.

Nothing of it runs. ``scan_source`` reads one file; here those of the program's own are put one into another, as its imports
lead to them. Its own is what is neither Python's nor installed.
"""

from __future__ import annotations

import os
import re
import sys

from ddplaunch.dataclass import dataclass, replace
from ddplaunch.errors import UsageError
from ddplaunch.files import read_regular_file
from ddplaunch.preload.facts import Assignment, Barrier, Certainty, Import, PathEntry, Statement, Step, Use
from ddplaunch.preload.scan import scan_source
from ddplaunch.preload.sources import find_root
from ddplaunch.preload.table import SITE_DIR_NAMES
from ddplaunch.target import source
from ddplaunch.target.target import Target

TORCH = "torch"
NEEDS_DYNAMO = re.compile(
    r"DistributedDataParallel|\boptim\b|\bfully_shard\b|FullyShardedDataParallel|torch\.compile|\.compile\("
    r"|\blightning\b|\bpytorch_lightning\b|\baccelerate\b|\btransformers\b|\bTrainer\b|ZeroRedundancyOptimizer"
)
"""What in source seems to use what imports ``torch._dynamo`` (and sympy with it, a second in every rank)."""

_MAX_FILES = 200  # as ``source.local_sources``
_ARCHIVES = (".zip", ".whl", ".egg", ".pyz")
_MAX_PARSED = 512 << 10  # bytes of the program's modules: they take some 100 ms


@dataclass(frozen=True)
class ProgramSource:
    """All of it.

    Attributes:
        steps: what it does, in order.
        folders: what it adds to ``sys.path``.
        words: all words in its files, names and those in strings.
        imports_torch: torch is certainly imported before anything else is done.
        dynamo: it seems to use what ``NEEDS_DYNAMO`` names.
    """

    steps: tuple[Step, ...] = ()
    folders: tuple[str, ...] = ()
    words: frozenset[str] = frozenset()
    imports_torch: bool = False
    dynamo: bool = False


def read_program(target: Target) -> ProgramSource:
    """Read the source of ``target``; a program whose source is not there says nothing."""
    if target.source is None or target.sys_path_0 is None:
        return ProgramSource()
    return _ProgramReader(target.sys_path_0).program(os.path.abspath(target.source), target.module or "")


class _ProgramReader:
    def __init__(self, first: str) -> None:
        self._first = first
        self._found: dict[str, tuple[Statement, ...]] = {}
        self._seen: dict[str, Certainty] = {}
        self._parsed = 0
        self._roots: dict[str, str] = {}  # the folder in front of each file's package
        self._known: dict[str, tuple[str, ...]] = {}  # files by the name of a module
        self._steps: list[Step] = []
        self._folders: list[str] = []
        self._words: set[str] = set()
        self._torch = self._others = self._dynamo = False

    def program(self, path: str, module: str) -> ProgramSource:
        for file in self._files(module):
            self._read(file, Certainty.CERTAIN)
        self._read(path, Certainty.CERTAIN, is_program=True)
        steps, folders, words = tuple(self._steps), tuple(self._folders), frozenset(self._words)
        return ProgramSource(steps, folders, words, self._torch, self._dynamo)

    def _read(self, file: str, reach: Certainty, *, is_program: bool = False) -> None:
        """Go through a file, unless that was done for an import that is as certain."""
        if self._seen.get(file, -1) >= reach:
            return
        self._seen[file] = reach
        if file not in self._found:
            self._found[file] = self._scan(file, is_program)
        for found in self._found[file]:
            self._note(replace(found, certainty=found.certainty.nested_in(reach)), file)

    def _scan(self, file: str, is_program: bool) -> tuple[Statement, ...]:
        name = os.path.relpath(file, self._first)
        try:
            size = 0 if is_program else os.path.getsize(file)
            if len(self._found) >= _MAX_FILES or self._parsed + size > _MAX_PARSED:
                return (Barrier(f"{name}:1", Certainty.CERTAIN, "is more source than is read at once"),)
            self._parsed += size
            text = read_regular_file(file, source.MAX_SOURCE).decode(errors="replace")
            found = scan_source(source.parse_file(file), file, name, shared=not is_program)
        except (OSError, UsageError, RecursionError):  # what imports it shows why
            return (Barrier(f"{name}:1", Certainty.CERTAIN, "cannot be read"),)
        self._dynamo = self._dynamo or bool(NEEDS_DYNAMO.search(text))
        self._words.update(re.findall(r"[^\W\d]\w*", text))
        return found

    def _note(self, found: Statement, file: str) -> None:
        if isinstance(found, Assignment | Use) and found.source and self._is_own(found.source, file):
            return
        if isinstance(found, Import):
            self._import(found, file)
        elif isinstance(found, PathEntry):
            self._folders.append(found.path)
            if os.path.isfile(found.path) or found.path.endswith(_ARCHIVES):
                self._steps.append(Barrier(found.where, found.certainty, "adds an archive to sys.path"))
        elif isinstance(found, Assignment):
            sure = found.certainty is Certainty.CERTAIN
            value = found.value if sure else None
            self._steps.append(
                replace(found, value=value, after_torch=self._torch, before_imports=sure and not self._others)
            )
        else:
            self._steps.append(found)

    def _import(self, found: Import, file: str) -> None:
        top = found.top_level_name
        if not found.level and (top in sys.stdlib_module_names or top == "ddplaunch"):
            return
        own = found.level or top != TORCH or self._root(top) == self._first  # torch is imported first, wherever it is
        if local := self._local(found, file) if own else []:
            for each in local:
                self._read(each, found.certainty)
        elif not found.level:
            names = tuple(name for name in found.names if name != "*")
            self._steps.append(replace(found, names=names))
            if found.certainty > Certainty.DEFERRED:
                self._others = True
            if found.certainty is Certainty.CERTAIN and top == TORCH:
                self._torch = True

    def _is_own(self, found: Import, file: str) -> bool:
        """Whether a statement imports what is the program's own, or ours."""
        return bool(found.level or found.module == "ddplaunch" or self._local(found, file))

    def _local(self, found: Import, file: str) -> list[str]:
        """The files of the program's own that the statement runs."""
        root = self._roots.get(file, self._first) if found.level else None
        package = os.path.relpath(os.path.dirname(file), root).replace(os.sep, ".").strip(".") if root else ""
        return [each for name in found.modules(package) for each in self._files(name, root)]

    def _files(self, name: str, root: str | None = None) -> tuple[str, ...]:
        """The files of the program's own that importing ``name`` runs; ``root``: the folder where it is, if known."""
        if name not in self._known:
            top = name.partition(".")[0]
            root = root or self._root(top) or ""
            self._known[name] = tuple(source.import_files(name, root)) if root and name else ()
            self._roots = {**dict.fromkeys(self._known[name], root), **self._roots}
        return self._known[name]

    def _root(self, top: str) -> str | None:
        """The folder in which the program's own module of this name stands; None where it has none."""
        for folder in (self._first, *self._folders):
            if next(source.import_files(top, folder), None):
                return folder
        root = find_root(top, self._first) if top and top not in sys.stdlib_module_names else None
        if root is None or not SITE_DIR_NAMES.isdisjoint(root.split(os.sep)):
            return None
        return None if root.startswith(os.path.dirname(os.__file__)) else root
