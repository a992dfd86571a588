"""What a trial has found: what one process may import for all ranks, and why the rest is imported in each."""

from __future__ import annotations

import json
import os
import re
import site
import sys
from collections.abc import Mapping

from ddplaunch import files
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.preload.digest import digest
from ddplaunch.preload.question import Question

VERSION = 1
"""Of what a trial proves and how a verdict is written; a verdict of another one is none."""

_MAX_BYTES = 4 << 20
_PLACES = frozenset({"TMPDIR", "TEMP", "TMP", "XDG_RUNTIME_DIR", "HOSTNAME"})
_OF_A_JOB = re.compile(
    r"(SLURM|SUBMITIT|FLUX|OMPI|PMI|PMIX|PBS|LSB|SGE|_CONDOR|AWS_BATCH|DSTACK|LEPTON|MLP|MA|VC|VK)_\w+"
)
_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri")


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
    digest: str  # of the file

    def holds(self) -> bool:
        """Whether it is installed as it was."""
        try:
            found = stamp(self.record)
            return found == self.stamp or digest_of_file(self.record) == self.digest
        except OSError:
            return False


@dataclass(frozen=True)
class Folder:
    """A folder that distributions are installed in; one more or less in it may change what the others do."""

    path: str
    mtime_ns: int

    def holds(self) -> bool:
        try:
            return os.stat(self.path).st_mtime_ns == self.mtime_ns
        except OSError:
            return False


@dataclass(frozen=True)
class Verdict:
    """The answer to a question; it holds while all distributions are as they were.

    Attributes:
        modules: what to import, in this order, torch among it.
        names: the top-level modules that this loads, and those that it looked for and did not find; a file or folder of
            the user's that has one of these names is not to be hidden by it.
        tried: those of the question's late modules that were tried, whatever came of it.
        folders: where all distributions are installed.
        variables: the variables that were read by name, each with a digest of its value ("" where it was not set):
            with another value an import may do something else.
    """

    modules: tuple[str, ...]
    excluded: tuple[Excluded, ...]
    distributions: tuple[Distribution, ...]
    names: frozenset[str]
    tried: frozenset[str]
    folders: tuple[Folder, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    def holds(self, environ: Mapping[str, str] | None = None) -> bool:
        """Whether all is as it was tried; ``environ`` is what the imports will see, our own environment if None."""
        environ = os.environ if environ is None else environ
        return (
            all(folder.holds() for folder in self.folders)
            and all(digest_of(name, environ.get(name)) == value for name, value in self.variables)
            and all(distribution.holds() for distribution in self.distributions)
        )


def key(question: Question, environ: Mapping[str, str]) -> str:
    """Name the file of a question's verdict: one for each question, late modules left out, and each interpreter.

    ``environ`` is what that has.
    """
    asked = vars(replace(question, late=()))
    devices = [path for path in _DEVICES if os.path.exists(path)]
    surroundings = [VERSION, os.path.realpath(sys.executable), sys.prefix, sys.version, folders(), devices]
    paths = [os.path.abspath(path) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    text = json.dumps([asked, surroundings, paths], sort_keys=True, default=vars)
    return digest(text.encode())[:32] + ".json"


def folders() -> list[str]:
    """The folders that distributions are installed in."""
    own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [path for path in dict.fromkeys([*site.getsitepackages(), *own]) if os.path.isdir(path)]


def stamp(path: str) -> tuple[int, int, int]:
    """Return what changes when a file does; OSError where it cannot be looked at."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def digest_of_file(path: str) -> str:
    """Return what tells files of different content apart; OSError where it cannot be read."""
    with open(path, "rb") as file:
        return digest(file.read())


def digest_of(name: str, value: str | None) -> str:
    """Return what tells values of a variable apart without telling the value, which may be a secret.

    Of what names a job it only tells whether it is set: each job has another; of its place and folder nothing.
    """
    if name in _PLACES:
        return ""
    if value is not None and _OF_A_JOB.fullmatch(name):
        return "set"
    return "" if value is None else digest(value.encode(errors="surrogateescape"))[:16]


def read(path: str) -> Verdict | None:
    """Return the verdict in a file; None where there is none that can be read, or one of another version."""
    try:
        found = json.loads(files.read_regular(path, _MAX_BYTES, links=False))
        if found.pop("version") != VERSION:
            return None
        return Verdict(
            modules=tuple(map(str, found["modules"])),
            excluded=tuple(Excluded(str(each["name"]), str(each["reason"])) for each in found["excluded"]),
            distributions=tuple(_distribution(each) for each in found["distributions"]),
            names=frozenset(map(str, found["names"])),
            tried=frozenset(map(str, found["tried"])),
            folders=tuple(Folder(str(each["path"]), int(each["mtime_ns"])) for each in found["folders"]),
            variables=tuple((str(name), str(value)) for name, value in found["variables"]),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _distribution(found: Mapping[str, object]) -> Distribution:
    inode, size, mtime = (int(str(each)) for each in found["stamp"])  # type: ignore[attr-defined]
    return Distribution(str(found["name"]), str(found["record"]), (inode, size, mtime), str(found["digest"]))


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else vars(value)


def write(verdict: Verdict, path: str) -> None:
    """Put a verdict in a file's place, whole or not at all; OSError where that cannot be done."""
    text = json.dumps({"version": VERSION, **vars(verdict)}, default=_plain)
    fresh = f"{path}.new"  # one trial a folder writes at a time
    with os.fdopen(files.create(fresh, os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(fresh, path)
