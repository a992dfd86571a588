"""Runtime API for training programs: rank, device, preemption, progress.

It also works without ddplaunch: under torchrun, or another launcher that sets torch's variables (RANK, LOCAL_RANK,
WORLD_SIZE), and as a world of one rank if none is set. Imports only what is needed, and initialises nothing.

    from ddplaunch import runtime

    if runtime.is_main():
        print(f"training on {runtime.world_size()} processes")
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
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
            left = "" if total is None else f", {_format_time((total - done) / rate)} left"
            line = f"{what}: {done}{'' if total is None else f'/{total}'}, {rate:.3g}/s{left}"
            sys.stderr.write(f"\r{line:{width}}" if live else f"{line}\n")
            sys.stderr.flush()
            width = len(line)
    finally:
        if live and width:  # clear the line for the next output
            sys.stderr.write(f"\r{'':{width}}\r")
            sys.stderr.flush()


def _format_time(seconds: float) -> str:
    """Return "45 s", "3:07" or "2:03:07"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}" if minutes else f"{rest} s"
