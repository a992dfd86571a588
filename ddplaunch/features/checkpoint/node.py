"""Finds the newest checkpoint when an attempt ends: a file or folder that ``--checkpoint`` matches.

The age of a folder is that of its newest file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from glob import iglob
from math import inf
from threading import Thread

from ddplaunch.base.errors import EXIT_PREEMPTED
from ddplaunch.core.events import AttemptPlanned, AttemptSwept, CheckpointFound, Event, RankExited, RankStarted
from ddplaunch.core.feature import NodeSide

MIN_AGE_S = 2.0  # a younger one may be incomplete, as its writer was stopped
SEARCH_TIMEOUT_S = 2.0  # for the search


class CheckpointFinder(NodeSide):
    """Emits the newest checkpoint after each attempt, on node 0."""

    def __init__(self, pattern: str, emit: Callable[[Event], None]) -> None:
        self._pattern, self._emit = pattern, emit
        self._is_node_zero = self._has_started = False
        self._codes: dict[int, int] = {}  # exit codes of the attempt, by rank

    def observe(self, event: Event) -> None:
        match event:
            case AttemptPlanned(plan=plan):
                self._is_node_zero, self._has_started, self._codes = plan.node_rank == 0, False, {}
            case RankStarted():
                self._has_started = True
            case RankExited(rank=rank, code=code):
                self._codes[rank] = code
            case AttemptSwept() if self._is_node_zero and self._has_started:
                if found := find_newest_checkpoint(self._pattern, self._codes.values()):
                    self._emit(found)


def find_newest_checkpoint(pattern: str, codes: Collection[int]) -> CheckpointFound | None:
    """Return the newest complete checkpoint; None if the search takes too long. ``codes``: exit codes of the ranks.

    Ranks that ended by themselves have finished writing, so a checkpoint of theirs may be of any age; the clock of a
    file server may even be ahead.
    """
    ended_well = bool(codes) and all(code in (0, EXIT_PREEMPTED) for code in codes)
    latest = inf if ended_well else time.time() - MIN_AGE_S
    checkpoints: list[CheckpointFound] = []
    # A disk may hang, and a pattern may match a whole file system: search in a thread, with a timeout.
    search = Thread(target=lambda: checkpoints.append(_find_newest(pattern, latest)), daemon=True)
    search.start()
    search.join(SEARCH_TIMEOUT_S)
    return checkpoints[0] if checkpoints else None


def _find_newest(pattern: str, latest: float) -> CheckpointFound:
    best = CheckpointFound(None, None)
    for path in iglob(os.path.expanduser(pattern), recursive=True):
        moment = max(map(_modified_at, _walk_files(path)), default=0.0)
        if 0 < moment <= latest and (best.moment is None or moment > best.moment):
            best = CheckpointFound(path, moment)
    return best


def _modified_at(file: str) -> float:
    try:
        return os.stat(file).st_mtime
    except OSError:
        return 0.0


def _walk_files(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
    for folder, _, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in names)
