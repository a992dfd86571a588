"""Decides which of the listed files of a folder are its code. Pure functions."""

from __future__ import annotations

import fnmatch
import posixpath
from collections.abc import Iterable, Sequence

from msgspec import Struct

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import format_count, format_size

MAX_BYTES = 50 << 20
"""Of all files together: code is smaller, and every host gets it."""

MAX_LISTED = 3  # of the largest files, in a message

OWN_FOLDER = ".ddplaunch"
"""Where ``submit`` keeps copies, in the folder that a job was submitted from; never part of the code."""

_NEVER = (".git", ".hg", ".svn", "__pycache__", OWN_FOLDER, ".ddplaunch-exit-*", "slurm-[0-9]*.out")
"""Names at any depth: of repositories, of bytecode, and of what jobs that were submitted here write."""

_SECRETS = (
    ".env", ".env.*", "*.env", ".netrc", "_netrc", ".pypirc", ".git-credentials", "*.key", "*.p12", "*.pfx", "*.jks",
    "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519",
)  # fmt: skip
_NO_SECRETS = (".env.example", ".env.sample", ".env.template", ".env.dist")


class CodeFile(Struct, frozen=True):
    """A regular file or a symbolic link in the folder that is copied."""

    path: str  # below the folder
    size: int = 0  # bytes
    is_executable: bool = False
    link: str | None = None  # where a symbolic link leads


class CodeFiles(Struct, frozen=True):
    """The files that are copied, by their paths, and the paths of secrets and of links out of the folder."""

    files: tuple[CodeFile, ...]
    secrets: tuple[str, ...] = ()  # paths that are left out for their names
    outside: tuple[str, ...] = ()  # links that lead out of the folder: copied as links, not what they lead to

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def is_secret(path: str) -> bool:
    """Whether the name of a file says that it holds passwords or a private key."""
    name = posixpath.basename(path).lower()
    return name not in _NO_SECRETS and _matches(name, _SECRETS)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def is_private_key(data: bytes) -> bool:
    """Whether this is the content of a private key, whatever its name."""
    head = data[:200].lstrip()
    return head.startswith(b"-----BEGIN ") and b"PRIVATE KEY-----" in head


def leads_out(path: str, link: str) -> bool:
    """Whether a link leads out of the folder; an absolute path does on any other machine."""
    there = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return link.startswith("/") or there.split("/")[0] == ".."


def choose_files(listed: Iterable[CodeFile]) -> CodeFiles:
    """Choose the files to copy from those that were listed."""
    files = sorted({file.path: file for file in listed}.values(), key=lambda file: file.path)
    files = [file for file in files if not any(_matches(name, _NEVER) for name in file.path.split("/"))]
    kept = [file for file in files if not is_secret(file.path)]
    return CodeFiles(
        tuple(kept),
        tuple(file.path for file in files if is_secret(file.path)),
        tuple(file.path for file in kept if file.link is not None and leads_out(file.path, file.link)),
    )


def check_size(files: Sequence[CodeFile], folder: str, hint: str) -> None:
    """Raise UsageError, with the largest files, if the files together are too large to be code."""
    size = sum(file.size for file in files)
    if size <= MAX_BYTES:
        return
    largest = sorted(files, key=lambda file: -file.size)[:MAX_LISTED]
    shown = ", ".join(f"{file.path} {format_size(file.size)}" for file in largest)
    what = f"--code {folder}: {format_count(len(files), 'file')} have {format_size(size)}, at most"
    raise UsageError(f"{what} {format_size(MAX_BYTES)} are copied; the largest: {shown}", hint)
