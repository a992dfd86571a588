"""The runs that the history keeps: which there are, their files, and how they are removed, the oldest by themselves."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ddplaunch.dataclass import replace
from ddplaunch.errors import EXIT_UNAVAILABLE, host_name
from ddplaunch.job.history import MAX_RUNS, history_dir, open_history_dir
from ddplaunch.job.record import RunRecord, RunState, read_record
from ddplaunch.output.run_log import run_names

MAX_BYTES = 256 << 20  # of all that is kept
REMOTE_RUN_TIMEOUT_S = (
    30 * 86400.0
)  # seconds after which a run on another machine, of which nothing more came, has ended
CLEANUP_TIMEOUT_S = 0.5  # seconds for removing runs at the end of one
ENDING = 30.0  # seconds after node 0's end in which every node of a run has written how it ended
CLEANUP_INTERVAL_RUNS = 10  # runs that may come until some are removed again


FIRST_RUN_SUFFIX = ".1"  # behind the name of the first run of a reused run id, which alone names the newest


def list_runs() -> list[str]:
    """The names of all runs that are kept, the latest first; none where the history is not this user's own.

    No two runs have the same: of those with one run id the first is RUN_ID.1, once there is a second, RUN_ID.2.
    """
    path = history_dir()
    if path is None:
        return []
    try:
        os.close(open_history_dir(path, create=False))
        with os.scandir(path) as entries:
            found = [(each.stat(follow_symlinks=False).st_mtime_ns, each.name) for each in entries if _is_run(each)]
    except OSError:
        return []
    taken = {name for _, name in found}
    return [name + FIRST_RUN_SUFFIX if _is_reused(name, taken) else name for _, name in sorted(found, reverse=True)]


def _is_reused(name: str, taken: set[str]) -> bool:
    """Whether the run in this folder was the first of several with its run id, and can be called so."""
    if f"{name}.2" not in taken or name + FIRST_RUN_SUFFIX in taken:
        return False
    second = read_run_record(f"{name}.2")
    return second is not None and second.run_id == name


def has_run(word: str) -> bool:
    """Whether this is the name of a run that is kept, or the run id of several."""
    return not {word, word + FIRST_RUN_SUFFIX}.isdisjoint(list_runs())


def _is_run(entry: os.DirEntry[str]) -> bool:
    ours = entry.stat(follow_symlinks=False).st_uid == os.geteuid()  # it may have been for others to write in before
    return ours and entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")


def run_dir(name: str) -> str:
    """Where the files of a run are."""
    path = os.path.join(history_dir() or "", name)
    return path if os.path.isdir(path) else path.removesuffix(FIRST_RUN_SUFFIX)


def read_node_records(name: str) -> list[RunRecord]:
    """The records of a run, one for each node that kept its own here, node 0 first."""
    with suppress(OSError):
        files = [each for each in os.listdir(run_dir(name)) if each.startswith("node-") and each.endswith(".jsonl")]
        found = [read_record(os.path.join(run_dir(name), file), name) for file in files]
        return settled(sorted(filter(None, found), key=lambda each: (each.node_rank, each.began)))
    return []


def settled(shares: Sequence[RunRecord]) -> list[RunRecord]:
    """The records of a run, node 0's first, those as LOST that others show to be; another machine's shows no more.

    A node that was lost has no part in node 0's later attempts. All end with node 0, at once or with 69 without it.
    """
    if not shares or shares[0].node_rank:
        return [*shares]
    first, *others = shares
    before = time.time() - ENDING
    if first.fate is RunState.RUNNING and any(
        each.code == EXIT_UNAVAILABLE and (each.ended or before) < before for each in others
    ):
        first = replace(first, fate=RunState.LOST)
    over = first.fate is RunState.LOST or (first.ended is not None and first.ended < before)

    def gone(share: RunRecord) -> bool:
        later = bool(first.attempts) and (not share.attempts or share.attempts[-1].number < first.attempts[-1].number)
        return share.fate is RunState.RUNNING and (over or (later and share.host in first.lost))

    return [first, *(replace(each, fate=RunState.LOST) if gone(each) else each for each in others)]


def newest_of(run_id: str, since: float) -> str | None:
    """The folder of the newest run with this id, where that went on at ``since``; None where none did."""
    path, newest = history_dir() or "", None
    for name in run_names(run_id):
        if not os.path.isdir(os.path.join(path, name)):
            break
        newest = name
    found = read_node_records(newest) if newest else []
    if not found or found[0].node_rank:  # node 0 keeps its record elsewhere
        return newest if any(each.fate in (RunState.LOST, RunState.STOPPED) for each in found) else None
    ended = found[0].ended or since + 1
    return newest if found[0].fate is not RunState.LOST and ended > since else None


def read_run_record(name: str) -> RunRecord | None:
    """The record of a run: of node 0 where that is here."""
    return next(iter(read_node_records(name)), None)


def read_all_records() -> Iterator[RunRecord]:
    """All runs that are kept, the latest first."""
    yield from filter(None, map(read_run_record, list_runs()))


def may_run(name: str) -> bool:
    """Whether it goes on, here or on another machine, as far as its record shows."""
    return any(map(_may_be_running, read_node_records(name)))


def last_seen(name: str) -> float:
    """When a run ended, or began where that is not known, in seconds since the epoch; 0 where it cannot be read."""
    return max((each.ended or each.began for each in read_node_records(name)), default=0.0)


def remove_run(name: str) -> bool:
    """Remove a run that has ended; return whether nothing of it is left."""
    if may_run(name):
        return False
    shutil.rmtree(run_dir(name), ignore_errors=True)
    return not os.path.lexists(run_dir(name))


def _may_be_running(share: RunRecord) -> bool:
    here = share.host == host_name()
    return share.fate is RunState.RUNNING and (here or time.time() - share.began < REMOTE_RUN_TIMEOUT_S)


def prune() -> None:
    """Remove the oldest runs, where there are too many or they take too many bytes.

    A run that ends waits for that: what takes longer than CLEANUP_TIMEOUT_S is left to the next.
    """
    until = time.monotonic() + CLEANUP_TIMEOUT_S
    size = 0
    known = list_runs()
    most = MAX_RUNS if len(known) <= MAX_RUNS else MAX_RUNS - CLEANUP_INTERVAL_RUNS
    excess = known[most:]
    for count, name in enumerate(known[:most]):
        size += run_size(name)
        if count and size > MAX_BYTES:
            excess = known[count:]
            break
    for name in reversed(excess):
        if time.monotonic() > until:
            return
        remove_run(name)


def run_size(name: str) -> int:
    """Bytes of all files of a run."""
    try:
        with os.scandir(run_dir(name)) as entries:
            return sum(each.stat(follow_symlinks=False).st_size for each in entries)
    except OSError:
        return 0
