"""Lists the files of a folder, with git if it is in a repository, and packs them into an archive named by its hash.

Equal files give equal archives: the entries are sorted, and have neither owners nor times.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator, Sequence

from msgspec import Struct

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.text import format_count, format_size, join_names
from ddplaunch.features.code.code_files import CodeFile, CodeFiles, check_size, choose_files, is_private_key
from ddplaunch.features.code.copies import FILE_TIME
from ddplaunch.system.code_version import CodeVersion
from ddplaunch.system.git_environ import git_environ

_ATTEMPTS = 5  # to read a file that changes


class CodeArchive(Struct, frozen=True):
    """The code of a job as a compressed archive."""

    data: bytes  # a tar archive, compressed by gzip
    version: CodeVersion
    files: frozenset[str]  # their paths
    size: int  # of the files, bytes
    by_git: bool
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        packed = f"{format_size(self.size)} ({format_size(len(self.data))} packed)"
        return f"{format_count(len(self.files), 'file')}, {packed}: {self.version}"

    def run_folder(self, cwd: str) -> str:
        """Return the current folder ``cwd`` relative to the copied folder. Raises UsageError if it is outside."""
        root = self.version.folder
        below = os.path.relpath(os.path.realpath(cwd), root)
        if below.split(os.sep)[0] == os.pardir:
            raise UsageError(f"--code {root}: the current folder {cwd} is not in it", "--code . copies this one")
        return below

    def check_target(self, source: str | None, typed: str) -> None:
        """Raise UsageError if the source of the target is in the copied folder, but would not run from the copy."""
        root = self.version.folder
        if source is None or os.path.commonpath([root, path := os.path.realpath(source)]) != root:
            return
        name = os.path.relpath(path, root)
        if name not in self.files:
            why, hint = ("git ignores it", f"git add -f {name}") if self.by_git else ("its path is hidden", "rename it")
            raise UsageError(f"--code copies no {name}: {why}", hint)
        if os.path.isabs(typed):
            what = f"{typed} is an absolute path: the copy would not run"
            raise UsageError(what, f"type {os.path.relpath(path)}")


def pack_folder(folder: str) -> CodeArchive:
    """Pack the code in a folder. Raises UsageError if there is none, or it is too large or changes all the time."""
    root = os.path.realpath(folder)
    if not os.path.isdir(root):
        raise UsageError(f"--code {folder}: no such folder", "--code . is the current one")
    by_git = _is_in_repository(root)
    chosen = choose_files(_list_by_git(root) if by_git else _list_all(root))
    check_size(chosen.files, folder, _SIZE_HINT if by_git else f"{_SIZE_HINT}; without git all files are copied")
    if not chosen.files:
        raise UsageError(f"--code {folder}: there are no files in {root}", "--code . is the current folder")
    packed, keys = _pack(root, chosen.files)
    left_out = [*chosen.secrets, *keys]
    commit = _run_git(root, "rev-parse", "--verify", "HEAD", check=False).strip() if by_git else ""
    clean = bool(commit) and _is_clean(root, chosen)
    sha = hashlib.sha256(packed).hexdigest()
    return CodeArchive(
        gzip.compress(packed, 6, mtime=0),
        CodeVersion(sha, root, commit or None, clean),
        frozenset(file.path for file in chosen.files) - {*keys},
        chosen.size,
        by_git,
        tuple(_notes(chosen, left_out)),
    )


def check_log_dir(log_dir: str | None) -> None:
    """Raise UsageError if the logs would lie in the copy of the code."""
    if log_dir is not None and not os.path.isabs(os.path.expanduser(log_dir)):
        what = f"--log-dir {log_dir} does not work with --code: it would be in the copy"
        raise UsageError(what, "give an absolute path")


_SIZE_HINT = "list data in .gitignore, and keep it where all hosts see it"


def _is_clean(root: str, chosen: CodeFiles) -> bool:
    """Whether the chosen files are equal to those of the git commit."""
    untracked = _run_git(root, "ls-files", "-z", "--others", "--exclude-standard").split("\0")
    return not _run_git(root, "diff", "--name-only", "HEAD", "--", ".") and not {*untracked} & {
        file.path for file in chosen.files
    }


def _notes(chosen: CodeFiles, left_out: Sequence[str]) -> Iterator[str]:
    if left_out:
        yield f"secrets are never copied: {join_names(left_out)}"
    if chosen.outside:
        yield f"copied as links, which lead out of the folder: {join_names(chosen.outside)}"


def _pack(root: str, files: Sequence[CodeFile]) -> tuple[bytes, list[str]]:
    """Return the archive without compression, and the files that were left out as they are private keys."""
    buffer, keys = io.BytesIO(), list[str]()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            info = tarfile.TarInfo(file.path)
            info.mtime, info.mode = FILE_TIME, 0o755 if file.is_executable else 0o644
            if file.link is not None:
                info.type, info.linkname = tarfile.SYMTYPE, file.link
                tar.addfile(info)
                continue
            data = _read_whole(root, file.path)
            if is_private_key(data):
                keys.append(file.path)
                continue
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue(), keys


def _read_whole(root: str, path: str) -> bytes:
    """Read a file; read it again if it was changed meanwhile."""
    try:
        for _ in range(_ATTEMPTS):
            fd = os.open(os.path.join(root, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                before = os.fstat(fd)
                data = file.read()
                after = os.fstat(fd)
            if (before.st_size, before.st_mtime_ns, len(data)) == (after.st_size, after.st_mtime_ns, after.st_size):
                return data
    except OSError as error:
        raise UsageError(f"--code: cannot read {path}: {error.strerror}", "list it in .gitignore") from None
    raise UsageError(f"--code: {path} changes while it is read", "wait for the end of that, or list it in .gitignore")


def _describe(root: str, path: str) -> CodeFile | None:
    """Return size and kind of a file to copy; None if it is gone, or neither a regular file nor a link."""
    try:
        info = os.lstat(os.path.join(root, path))
        if stat.S_ISLNK(info.st_mode):
            return CodeFile(path, link=os.readlink(os.path.join(root, path)))
    except OSError:
        return None
    return CodeFile(path, info.st_size, bool(info.st_mode & 0o100)) if stat.S_ISREG(info.st_mode) else None


def _list_all(root: str) -> Iterator[CodeFile]:
    """List all files that are not hidden, in folders that are not hidden."""
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = [name for name in folders if not name.startswith(".") and name not in (*links, "__pycache__")]
        for name in (*links, *names):
            path = os.path.relpath(os.path.join(folder, name), root)
            if not name.startswith(".") and (file := _describe(root, path)):
                yield file


def _list_by_git(root: str, prefix: str = "") -> Iterator[CodeFile]:
    """List the files that git tracks or does not ignore, also in submodules and in repositories within this one."""
    folder = os.path.join(root, prefix)
    tracked = _run_git(folder, "ls-files", "-z", "--cached", "--recurse-submodules")
    others = _run_git(folder, "ls-files", "-z", "--others", "--exclude-standard")
    for path in filter(None, f"{tracked}{others}".split("\0")):
        if path.endswith("/"):
            yield from _list_by_git(root, prefix + path)
        elif file := _describe(root, prefix + path):
            yield file


def _is_in_repository(root: str) -> bool:
    """Whether a folder is in a repository of git that does not ignore it."""
    folder = root
    while not os.path.lexists(os.path.join(folder, ".git")):
        if folder == os.path.dirname(folder):
            return False
        folder = os.path.dirname(folder)
    return folder == root or not _run_git(folder, "check-ignore", "--", root, check=False)


def _run_git(folder: str, *words: str, check: bool = True) -> str:
    """Run git in a folder, without the variables that a git hook has set; return its output. Raises UsageError."""
    argv = ["git", "--no-optional-locks", "-C", folder, *words]
    try:
        done = subprocess.run(
            argv, env=git_environ(os.environ), stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError as error:
        what = f"--code: {folder} is in a git repository, and git cannot be run: {error.strerror}"
        raise UsageError(what, "install git: it knows which files are ignored") from None
    if done.returncode and check:
        why = sanitize_line(os.fsdecode(done.stderr).strip().partition("\n")[0], 300)
        raise UsageError(f"--code: git cannot list the files of {folder}: {why}")
    return os.fsdecode(done.stdout)
