"""What a run was: versions, packages, GPUs, names of variables, commit and changes; stored beside its record."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.safe_files import read_file_and_owner
from ddplaunch.base.types import Name, Path, Size, TextLine, convert
from ddplaunch.features.runs.provenance_probe import MAX_FILES
from ddplaunch.observe.history import history_store

SUFFIX = ".provenance"  # of the files of a node, after "node-0"
MAX_BYTES = 4 << 20  # of the file
SHORT_COMMIT = 12  # digits of a commit that are shown


class GitState(Struct, frozen=True):
    """What git knew of the code of a run."""

    root: Path  # of the work tree
    commit: Name | None = None  # None before the first commit
    branch: TextLine = ""  # "(detached)" without a branch
    changed: tuple[TextLine, ...] = ()  # files
    new: tuple[TextLine, ...] = ()  # files and folders that git neither tracks nor ignores
    diff_bytes: Size = 0  # of the stored changes
    is_diff_cut: bool = False  # whether the changes were longer

    @property
    def is_clean(self) -> bool:
        return not self.changed and not self.new

    def __str__(self) -> str:
        counts = (
            [f"{_format_file_count(self.changed)} file{'s' * (len(self.changed) != 1)} changed"] if self.changed else []
        )
        counts += [f"{_format_file_count(self.new)} new"] if self.new else []
        at = f"commit {self.commit[:SHORT_COMMIT]}" if self.commit else "no commit yet"
        on = f" on {self.branch}" if self.branch and not self.branch.startswith("(") else ""
        return ", ".join((at + on, *counts))


class Provenance(Struct, frozen=True):
    """The provenance of a run on one node: versions, GPUs, commit and others; None where it is unknown."""

    host: Name
    python: Name
    torch: Name | None = None
    cuda: Name | None = None  # the version of CUDA, or of ROCm, that torch uses
    driver: Name | None = None
    gpus: tuple[TextLine, ...] = ()  # models
    packages: Mapping[str, TextLine] = {}  # versions by name
    variables: tuple[TextLine, ...] = ()  # names, without those of login and terminal
    git: GitState | None = None  # None outside of a repository
    git_error: TextLine | None = None

    @property
    def code(self) -> str:
        """The commit as text, or why it is unknown."""
        return str(self.git) if self.git else f"commit unknown: {self.git_error}" if self.git_error else ""

    @property
    def versions(self) -> dict[str, str]:
        """The known versions of Python, torch, CUDA and the driver, by name."""
        named = {"Python": self.python, "torch": self.torch, "CUDA": self.cuda, "driver": self.driver}
        return {name: version for name, version in named.items() if version}

    def lines(self) -> Iterator[str]:
        """Yield the lines on commit and versions for the report."""
        yield from filter(None, [self.code])
        yield ", ".join(f"{name} {version}" for name, version in self.versions.items())


def _format_file_count(names: Sequence[str]) -> str:
    """Format the number of files that are listed, of which there may be more: "1", "200 or more"."""
    return f"{len(names)}{' or more' * (len(names) >= MAX_FILES)}"


def provenance_path(run: str, node_rank: int, suffix: str = ".json") -> str:
    return os.path.join(history_store.run_dir(run), f"node-{node_rank}{SUFFIX}{suffix}")


def read_provenance(run: str, node_rank: int = 0) -> Provenance | None:
    """Read the provenance of a run on one node; None if it is not recorded."""
    return read_provenance_file(provenance_path(run, node_rank))


def read_provenance_file(path: str) -> Provenance | None:
    """Read a file that the probe has written; None if it is missing, invalid or another user's."""
    try:
        data, owner = read_file_and_owner(path, MAX_BYTES, follow_symlinks=False)
        return convert(json.loads(data), Provenance) if owner == os.geteuid() else None
    except (OSError, ProtocolError, ValueError, RecursionError):
        return None


def read_diff(run: str, node_rank: int = 0) -> bytes:
    """Read the stored changes of a run, as ``git apply`` takes them; empty without any."""
    return read_diff_file(provenance_path(run, node_rank, ".diff"))


def read_diff_file(path: str) -> bytes:
    """Read a file of changes; empty if it is missing or another user's."""
    try:
        data, owner = read_file_and_owner(path, MAX_BYTES, follow_symlinks=False)
        return data if owner == os.geteuid() else b""
    except OSError:
        return b""
