"""What a training program may ask about where it runs.

It works without ddplaunch too: under torchrun, or whatever else sets torch's variables (RANK, LOCAL_RANK, WORLD_SIZE),
and as a world of one where nothing is set. Nothing is imported until it is needed, and nothing is initialised here.

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
    """This process among all of the job, from 0."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process among those of its node, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """How many processes the job has."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this is rank 0: the one that prints, and writes what is to be written once."""
    return rank() == 0


def device() -> torch.device:
    """What this process is to compute on: the device that ddplaunch gave it, else its GPU by local rank, else the CPU.

    It is not made the current one: ``torch.cuda.set_device(runtime.device())`` does that.
    """
    import torch

    if given := os.environ.get("DDPLAUNCH_DEVICE"):
        return torch.device(given)
    count = torch.cuda.device_count()
    return torch.device("cuda", local_rank() % count) if count else torch.device("cpu")


def preempted() -> bool:
    """Whether the scheduler wants the machines back soon, so that it is time for a checkpoint and the end.

    It costs a system call. Ranks may see it at different moments, so they agree before they act on it, as
    docs/preemption.md shows. A job of which any rank was told True ends with exit code 75, "the same may be tried
    again"; one whose ranks finish their work without asking has just finished. Without ddplaunch: always False.
    """
    path = os.environ.get("DDPLAUNCH_PREEMPTED_FILE")
    if not path or not os.path.exists(path):
        return False
    try:  # for the launcher, which tells a job that made room from one that was done
        os.close(os.open(f"{path}.seen", os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError:
        pass
    return True


def working() -> None:
    """Tell ddplaunch that this rank is at work though nothing shows it: it waits for a reply, say, or polls.

    The clock of ``--stall-timeout`` begins anew, as if the rank had printed a line. It costs a system call or two, so
    call it in the loop that waits. Without ddplaunch: nothing happens.
    """
    path = os.environ.get("DDPLAUNCH_PREEMPTED_FILE")
    if not path:
        return
    file, now = os.path.join(os.path.dirname(path), f"working.{rank()}"), time.monotonic_ns()
    try:
        if not os.path.exists(file):
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        os.utime(file, ns=(now, now))  # of the launcher's clock too, and nobody sets it
    except OSError:
        pass


def progress(steps: Iterable[Step], what: str = "steps") -> Iterator[Step]:
    """Go through ``steps``, while rank 0 shows on stderr how far it is; other ranks are silent.

    In a terminal, through ddplaunch too, that is one line that changes twice a second; in a log a line a minute.
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
        if live and width:  # the line makes way for what is printed next
            sys.stderr.write(f"\r{'':{width}}\r")
            sys.stderr.flush()


def _format_time(seconds: float) -> str:
    """Return "45 s", "3:07" or "2:03:07"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}" if minutes else f"{rest} s"
