"""What there is of a run beside its records, for the page: its readings, its plan, what its ranks printed last."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from ddplaunch.commands.runs.page.output import MOST
from ddplaunch.commands.runs.page.run import Beside
from ddplaunch.errors import LaunchError
from ddplaunch.job import logs, past, readings
from ddplaunch.job.record import RunRecord
from ddplaunch.job.runs import Found


def beside(found: Found, shares: Sequence[RunRecord], *, live: bool = False, effective: str = "") -> Beside:
    """Gather it, from the history, the log folder and, while the run goes on, its launcher.

    ``effective`` says how much of the time it trained.
    """
    folder = past.folder(found.run)
    of_nodes = [os.path.join(folder, readings.file_of(each.node_rank)) for each in shares]
    plan = readings.read_plan(os.path.join(folder, readings.plan_of(shares[0].node_rank)))
    known = tuple(tuple(readings.read(path)) for path in of_nodes)
    failed = logs.failed(shares[0]) if shares[0].code else []
    printed, attempt = _printed(found)
    return Beside(known, printed, failed, plan, live, effective, attempt)


def _printed(found: Found) -> tuple[dict[int, bytes], int | None]:
    """The last that each rank has printed, and in which attempt; of one that ended well nothing may be kept."""
    if found.running:
        said: dict[int, bytes] = {}
        with suppress(LaunchError):
            for rank, data in logs.live(found.running.path, (), follow=False):
                said[rank] = (said.get(rank, b"") + data)[-MOST:]
        if said:
            return said, None
    kept = {rank: paths[-1] for rank, paths in logs.files(found.run).items()}
    last = max(map(logs.attempt_of, kept.values()), default=None)
    return {rank: tail for rank, path in kept.items() if (tail := _tail(path))}, last


def _tail(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MOST))
            return file.read(MOST)
    except OSError:
        return b""
