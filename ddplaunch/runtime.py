"""Runtime API for training programs: rank, device, preemption, progress, work that one rank of a node does first.

It also works without ddplaunch: under torchrun, or another launcher that sets torch's variables (RANK, LOCAL_RANK,
WORLD_SIZE), and as a world of one rank if none is set. Imports only what is needed, and initialises nothing.

    from ddplaunch import runtime

    if runtime.is_main():
        print(f"training on {runtime.world_size()} processes")
"""

from __future__ import annotations

import fcntl
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager
    from typing import TypeVar

    import torch

    Step = TypeVar("Step")


def rank() -> int:
    """The number of this process in the job, from 0."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """The number of this process on its node, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """The number of processes of the job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this is rank 0: the one that prints, and writes checkpoints."""
    return rank() == 0


def device() -> torch.device:
    """The device of this process: the one that ddplaunch assigned, else the GPU of its local rank, else the CPU.

    It is not set as the current device: ``torch.cuda.set_device(runtime.device())`` does that.
    """
    import torch

    if given := os.environ.get("DDPLAUNCH_DEVICE"):
        return torch.device(given)
    count = torch.cuda.device_count()
    return torch.device("cuda", local_rank() % count) if count else torch.device("cpu")


def preempted() -> bool:
    """Whether the job is being preempted: save a checkpoint and end.

    Costs a system call. Ranks may see it at different moments, so they must agree before they act on it, as
    docs/preemption.md shows. If this returned True in any rank, the job ends with exit code 75 ("try again"); if the
    ranks finish without calling it, the job has succeeded. Without ddplaunch: always False.
    """
    path = os.environ.get("DDPLAUNCH_PREEMPTED_FILE")
    if not path or not os.path.exists(path):
        return False
    try:  # for the launcher: the job ends as preempted, not as finished
        os.close(os.open(f"{path}.seen", os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError:
        pass
    return True


def working() -> None:
    """Report that this rank is working although it looks idle: it waits for a reply, or polls.

    Restarts the clock of ``--stall-timeout``, as if the rank had printed a line. Costs a system call or two: call it
    in the loop that waits. Without ddplaunch: does nothing.
    """
    path = os.environ.get("DDPLAUNCH_PREEMPTED_FILE")
    if not path:
        return
    file, now = os.path.join(os.path.dirname(path), f"working.{rank()}"), time.monotonic_ns()
    try:
        if not os.path.exists(file):
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        os.utime(file, ns=(now, now))  # monotonic: the launcher has the same clock, and it is never set
    except OSError:
        pass


def local_first(timeout_s: float = 3600.0) -> AbstractContextManager[bool]:
    """Run the block on the first rank of each node, then on the node's other ranks, which wait for it.

    For what all ranks of a node need and one should make: a cache, a download, a compiled extension. The value is True
    on the rank that goes first. Every rank must use it equally often, and must not wait for other ranks in the block.

        with runtime.local_first():
            dataset = load_dataset("squad")

    Raises RuntimeError on the others if the first rank fails in the block or ends, TimeoutError after ``timeout_s``.
    """
    return _LocalFirst(timeout_s)


_DONE = b"+"
"""What the first rank writes after its block; each other rank that reads it adds one. On an error, its text."""

_POLL_INTERVAL_S = 0.05
_uses = 0  # of ``local_first`` in this process


class _LocalFirst:
    """One use of ``local_first``."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._descriptor: int | None = None  # of the locked file, in the first rank

    def __enter__(self) -> bool:
        global _uses
        _uses += 1
        count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if count == 1:
            return True
        path = _first_rank_file(_uses)
        try:  # where all ranks have LOCAL_RANK 0 (--virtual-local-rank), the first to come is the first rank
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(f"{path}.new", flags, 0o600) if local_rank() == 0 else None
        except FileExistsError:
            descriptor = None
        if descriptor is None:
            _wait_for_first(path, count, self._timeout_s)
            return False
        # Locked before it has its name, so that the others never find it unlocked while the block runs. Unlike a lock
        # of flock(2), one of fcntl(2) ends with this process although a child that it has forked lives on.
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        os.link(f"{path}.new", path)
        self._descriptor = descriptor
        return True

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._descriptor is not None:
            try:
                os.write(self._descriptor, _DONE if error is None else _describe_error(error))
            finally:
                os.close(self._descriptor)


def _describe_error(error: BaseException) -> bytes:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # of its own __str__
        text = type(error).__name__
    return text[:500].encode(errors="replace")


def _first_rank_file(use: int) -> str:
    """The path of the file that the ranks of this node share: in the run's folder, which the launcher removes.

    Under other launchers in the folder for temporary files; the ranks of a node have the same parent there.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if path := os.environ.get("DDPLAUNCH_PREEMPTED_FILE"):
        return os.path.join(os.path.dirname(path), f"first.{attempt}.{use}")
    import tempfile  # it takes 7 ms

    job = f"{os.getuid()}-{os.getppid()}-{os.environ.get('MASTER_PORT', '')}"
    return os.path.join(tempfile.gettempdir(), f"ddplaunch-first-{job}.{attempt}.{use}")


def _wait_for_first(path: str, count: int, timeout_s: float) -> None:
    """Wait until the first rank has left its block."""
    deadline = time.monotonic() + timeout_s
    while (text := _read_unlocked(path, count)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"runtime.local_first: the first rank of this node needs more than {timeout_s:g} s")
        time.sleep(_POLL_INTERVAL_S)
    if not text.startswith(_DONE):
        why = text.decode(errors="replace") or "it has ended"
        raise RuntimeError(f"runtime.local_first: the first rank of this node failed: {why}")


def _read_unlocked(path: str, count: int) -> bytes | None:
    """Return what the first rank has written; None while that rank has not come, or is in its block."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        text = os.pread(descriptor, 1000, 0)
        if text.startswith(_DONE):
            os.write(descriptor, _DONE)
            if len(text) + 1 == count:  # the last one
                os.unlink(path)
                os.unlink(f"{path}.new")
        return text
    except (BlockingIOError, PermissionError):  # both mean "locked"
        return None
    finally:
        os.close(descriptor)


def progress(steps: Iterable[Step], what: str = "steps") -> Iterator[Step]:
    """Progress bar: iterate over ``steps``; rank 0 prints the progress on stderr, other ranks print nothing.

    In a terminal (also through ddplaunch) one line that is updated twice a second; in a log one line a minute.
    """
    if not is_main():
        yield from steps
        return
    live = os.environ.get("DDPLAUNCH_TERMINAL") == "1" or sys.stderr.isatty()
    total = len(steps) if hasattr(steps, "__len__") else None  # type: ignore[arg-type]
    began = printed = time.monotonic()
    width = done = 0
    try:
        for step in steps:
            yield step
            done += 1
            now = time.monotonic()
            if now - printed < (0.5 if live else 60.0):
                continue
            printed, rate = now, done / (now - began)
            left = "" if total is None else f", {_format_duration((total - done) / rate)} left"
            line = f"{what}: {done}{'' if total is None else f'/{total}'}, {rate:.3g}/s{left}"
            sys.stderr.write(f"\r{line:{width}}" if live else f"{line}\n")
            sys.stderr.flush()
            width = len(line)
    finally:
        if live and width:  # clear the line for the next output
            sys.stderr.write(f"\r{'':{width}}\r")
            sys.stderr.flush()


def _format_duration(seconds: float) -> str:
    """Return "45 s", "3:07" or "2:03:07"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}" if minutes else f"{rest} s"
