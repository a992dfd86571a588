"""Claim files: each says what one launcher holds or waits for: GPUs, CPUs, or one of the N places of ``--jobs N``.

Each launcher has a file of its own, and holds a lock on it (flock(2)) until it ends, also if it is killed. A file
without a lock is left over, and ignored. ``Claims.lock`` guards all decisions. Files are only ever opened for reading
by others, never through symbolic links, so the folder may be one in which any user can write.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from msgspec import Struct

from ddplaunch.base.errors import LaunchError, sanitize_line
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.safe_files import list_dir
from ddplaunch.base.types import Pid, TextLine, as_dict, parse

PREFIX = "ddplaunch-claim"
GUARD = "ddplaunch-claims.lock"
MAX_CLAIM_BYTES = 1 << 17  # a claim that waits names all units that it would take: MAX_JOBS places take 80 kB
GUARD_INTERVAL_S = 0.005
GUARD_TIMEOUT_S = 60.0
"""For another process to release the lock: it may query the GPUs of the machine, and may be suspended."""


class Claim(Struct, frozen=True):
    """The GPUs, CPUs or place for a run that a launcher has on this machine, or waits for."""

    queue: TextLine  # "gpus": the claims of one queue wait in one order
    what: TextLine  # in words, "2 free GPUs"
    pid: Pid
    job: TextLine = ""  # the local job that it belongs to
    units: tuple[TextLine, ...] = ()  # what it has, or, while it waits, what it would take: addresses of GPUs, CPUs
    shared: bool = False  # whether others may have the same units: the run uses them, and has not reserved them


class ClaimFile(Struct, frozen=True):
    """A claim and its file. The file's name has the time of arrival; the order of these times is the queue."""

    name: str
    user: str
    claim: Claim

    @property
    def order(self) -> list[str]:
        return _order(self.name)

    @property
    def has_units(self) -> bool:
        return self.name.startswith(f"{PREFIX}.has.")


class OwnClaim:
    """The claim file of this process, which keeps the file locked."""

    def __init__(self, folder: str, fd: int, name: str) -> None:
        self._folder, self._fd, self.name = folder, fd, name
        os.register_at_fork(after_in_child=self._close)  # a child that outlives the run must not keep the lock

    def precedes(self, other: ClaimFile) -> bool:
        """Whether this claim comes before ``other`` in the queue, or is the same claim."""
        return _order(self.name) <= other.order

    def record_units(self, claim: Claim) -> None:
        """Write the units that this process has got to its file; may be called only while the claims are locked."""
        _write(self._fd, claim)
        name = self.name.replace(f"{PREFIX}.wait.", f"{PREFIX}.has.", 1)
        os.rename(os.path.join(self._folder, self.name), os.path.join(self._folder, name))
        self.name = name

    def release(self) -> None:
        """Remove the claim file, which ends the claim."""
        if self._fd >= 0:
            with suppress(OSError):
                os.unlink(os.path.join(self._folder, self.name))
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Claims:
    """The claim files in a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock under which launchers change claims. Raises LaunchError if it cannot be taken."""
        fd = self._open_lock_file()
        deadline = time.monotonic() + GUARD_TIMEOUT_S
        try:
            while not _try_lock(fd, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    path = os.path.join(self._folder, GUARD)
                    what = f"another process has locked {path} for {GUARD_TIMEOUT_S:g} s"
                    raise LaunchError(what, f"it may be suspended: `fuser {path}` shows it")
                time.sleep(GUARD_INTERVAL_S)
            yield
        finally:
            os.close(fd)

    def add(self, claim: Claim, *, waits: bool) -> OwnClaim:
        """Create the file of this process, last in its queue; with ``waits``, only while the claims are locked."""
        # The monotonic clock is that of the machine, and does not jump.
        name = f"{PREFIX}.{'wait' if waits else 'has'}.{time.monotonic_ns():020}.{os.getpid()}"
        new = os.path.join(self._folder, f".{name}")
        fd = _create(new)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(fd, claim)
            os.rename(new, os.path.join(self._folder, name))
        except OSError:
            os.close(fd)
            with suppress(OSError):
                os.unlink(new)
            raise
        return OwnClaim(self._folder, fd, name)

    def list(self, queue: str | None) -> list[ClaimFile]:
        """List the claims of living launchers, in order of arrival; left-over files of this user are removed.

        ``queue``: None is all.
        """
        names = [name for name in list_dir(self._folder) if name.startswith((f"{PREFIX}.has.", f"{PREFIX}.wait."))]
        found = filter(None, map(self._read, sorted(names, key=_order)))
        return [each for each in found if queue in (None, each.claim.queue)]

    def is_waiting(self, name: str) -> bool:
        """Whether the launcher of this file still waits."""
        try:
            fd = self._open(name)
        except OSError:
            return False
        try:
            return not _try_lock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)

    def _read(self, name: str) -> ClaimFile | None:
        try:
            fd = self._open(name)
        except OSError:
            return None
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                return None
            if _try_lock(fd, fcntl.LOCK_SH):
                if info.st_uid == os.geteuid():
                    with suppress(OSError):
                        os.unlink(os.path.join(self._folder, name))
                return None
            return ClaimFile(name, user_name(info.st_uid), parse(os.pread(fd, MAX_CLAIM_BYTES, 0), Claim))
        except (OSError, ProtocolError):
            return None
        finally:
            os.close(fd)

    def _open(self, name: str) -> int:
        path = os.path.join(self._folder, name)
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _open_lock_file(self) -> int:
        """Open the file of the lock; a new one gets its name last, when all users can read it."""
        path = os.path.join(self._folder, GUARD)
        try:
            for _ in range(3):
                with suppress(FileNotFoundError):
                    fd = self._open(GUARD)
                    if stat.S_ISREG(os.fstat(fd).st_mode):
                        return fd
                    os.close(fd)
                    raise OSError(errno.EINVAL, "not a regular file")
                new = f"{path}.{os.getpid()}"
                os.close(_create(new))
                try:
                    with suppress(FileExistsError):
                        os.link(new, path)
                finally:
                    os.unlink(new)
            raise OSError(errno.ENOENT, "another process removes it")
        except OSError as error:
            what = f"cannot lock {sanitize_line(path)}: {error.strerror}"
            raise LaunchError(what, "DDPLAUNCH_LOCK_DIR=FOLDER names another folder") from None


def _order(name: str) -> list[str]:
    """Return the key that sorts files in order of arrival: the moment and the PID in their names."""
    return name.split(".")[2:]


def _create(path: str) -> int:
    with suppress(FileNotFoundError):
        os.unlink(path)  # of an earlier process with this PID
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o644)  # whatever the umask
    return fd


def _write(fd: int, claim: Claim) -> None:
    data = json.dumps(as_dict(claim)).encode("utf-8", "replace")
    os.pwrite(fd, data, 0)
    os.ftruncate(fd, len(data))


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def user_name(uid: int) -> str:
    """Return the name of a user; the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def units_taken(claims: Sequence[ClaimFile]) -> dict[str, ClaimFile]:
    """Return each unit that a launcher has, with its claim."""
    return {unit: each for each in claims if each.has_units for unit in each.claim.units}
