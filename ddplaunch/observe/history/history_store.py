"""The history store: lists recorded runs, reads their records, and prunes the oldest."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_UNAVAILABLE, host_name
from ddplaunch.base.safe_files import list_dir
from ddplaunch.core.output.run_log import candidate_names
from ddplaunch.observe.history.run_record import RunRecord, RunState, is_launcher_alive, read_record, read_record_head
from ddplaunch.system.history_dir import history_dir, open_history_dir

MAX_RUNS = 2000  # in the history
MAX_BYTES = 256 << 20  # of the whole history
REMOTE_RUN_TIMEOUT_S = 30 * 86400.0  # a run on another machine without a recorded end counts as ended after this
CLEANUP_TIMEOUT_S = 0.5  # for removing old runs at the end of a run
END_RECORD_TIMEOUT_S = 30.0  # after node 0's end, for every node of a run to have written its own
CLEANUP_INTERVAL_RUNS = 10  # new runs between two prunings


FIRST_RUN_SUFFIX = ".1"  # of the first run of a reused run id; the id itself names the newest


class RunFolder(NamedTuple):
    """What the folder of a run shows without the run's records: reading those of 2,000 runs would take seconds."""

    name: str
    modified_ns: int
    changed_at: float  # in seconds since the epoch; not before the end of a run that is over
    is_over: bool  # its launcher has recorded the end


OVER_BIT = stat.S_ISVTX
"""The mode bit that marks a run as over in its folder; it has no other effect if only the owner may enter it."""


def list_runs() -> list[str]:
    """List the names of all recorded runs, the latest first; none where the history belongs to another user.

    Names are unique: of several runs with one run id the first is RUN_ID.1, once there is a second, RUN_ID.2.
    """
    return [each.name for each in list_folders()]


def list_folders() -> list[RunFolder]:
    """List the folders of all recorded runs, with the names and in the order of ``list_runs``."""
    path = history_dir()
    if path is None:
        return []
    try:
        os.close(open_history_dir(path, create=False))
        with os.scandir(path) as entries:
            folders = [found for each in entries if (found := _stat_folder(each)) is not None]
    except OSError:
        return []
    taken = {each.name for each in folders}
    latest_first = sorted(folders, key=lambda each: (each.modified_ns, each.name), reverse=True)
    return [
        each._replace(name=each.name + FIRST_RUN_SUFFIX) if _is_first_of_several(each.name, taken) else each
        for each in latest_first
    ]


def mark_run_over(folder: int) -> None:
    """Mark a run as over in the mode of its folder. Errors are ignored: then the run's records are read."""
    with suppress(OSError):
        os.fchmod(folder, 0o700 | OVER_BIT)


def _is_first_of_several(name: str, taken: set[str]) -> bool:
    """Whether run ``name`` was the first of several with one run id, and no other run has the name of a first run."""
    if f"{name}.2" not in taken or name + FIRST_RUN_SUFFIX in taken:
        return False
    second = read_run_record(f"{name}.2")
    return second is not None and second.run_id == name


def is_recorded_run(word: str) -> bool:
    """Whether ``word`` is the name of a recorded run, or the run id of several runs."""
    return not {word, word + FIRST_RUN_SUFFIX}.isdisjoint(list_runs())


def _stat_folder(entry: os.DirEntry[str]) -> RunFolder | None:
    """Return the facts of a run's folder; None if the path is no run's folder, is another user's, or is gone."""
    with suppress(OSError):
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            found = entry.stat(follow_symlinks=False)
            if found.st_uid == os.geteuid():
                return RunFolder(entry.name, found.st_mtime_ns, found.st_ctime, bool(found.st_mode & OVER_BIT))
    return None


def run_dir(name: str) -> str:
    """Return the folder of a run's files."""
    path = os.path.join(history_dir() or "", name)
    return path if os.path.isdir(path) else path.removesuffix(FIRST_RUN_SUFFIX)


def read_node_records(name: str) -> list[RunRecord]:
    """Read the records of a run, one for each node with a record in this history, node 0's first."""
    with suppress(OSError):
        files = [each for each in os.listdir(run_dir(name)) if each.startswith("node-") and each.endswith(".jsonl")]
        records = [read_record(os.path.join(run_dir(name), file), name) for file in files]
        return mark_lost_nodes(sorted(filter(None, records), key=lambda each: (each.node_rank, each.began)))
    return []


def mark_lost_nodes(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the records of a run, node 0's first, with state LOST where the other records show that a node was lost.

    The record of another machine alone does not show it: its launcher cannot be looked up here. A lost node has no part
    in node 0's later attempts. All nodes end with node 0: at once, or with exit code 69 when node 0 is lost.
    """
    if not records or records[0].node_rank:
        return [*records]
    first, *others = records
    before = time.time() - END_RECORD_TIMEOUT_S
    if first.fate is RunState.RUNNING and any(
        each.code == EXIT_UNAVAILABLE and (each.ended or before) < before for each in others
    ):
        first = replace(first, fate=RunState.LOST)
    over = first.fate is RunState.LOST or (first.ended is not None and first.ended < before)

    def is_lost(node: RunRecord) -> bool:
        later = bool(first.attempts) and (not node.attempts or node.attempts[-1].number < first.attempts[-1].number)
        return node.fate is RunState.RUNNING and (over or (later and node.host in first.lost))

    return [first, *(replace(each, fate=RunState.LOST) if is_lost(each) else each for each in others)]


def find_newest_run(run_id: str, since: float) -> str | None:
    """Find the folder of the newest run with this id, if it was still running at ``since``; else None."""
    path, newest = history_dir() or "", None
    for name in candidate_names(run_id):
        if not os.path.isdir(os.path.join(path, name)):
            break
        newest = name
    records = read_node_records(newest) if newest else []
    if not records or records[0].node_rank:  # node 0's record is elsewhere
        return newest if any(each.fate in (RunState.LOST, RunState.STOPPED) for each in records) else None
    ended = records[0].ended or since + 1
    return newest if records[0].fate is not RunState.LOST and ended > since else None


def read_run_record(name: str) -> RunRecord | None:
    """Read the record of a run: node 0's if this history has it, else another node's; None without any."""
    return next(iter(read_node_records(name)), None)


def read_heads_of_local_launchers() -> Iterator[RunRecord]:
    """Read the first line of each record whose launcher is alive on this machine."""
    here = host_name()
    for name in (each.name for each in list_folders() if not each.is_over):
        with suppress(OSError):
            for file in os.listdir(folder := run_dir(name)):
                if file.startswith("node-") and file.endswith(".jsonl"):
                    head = read_record_head(os.path.join(folder, file), name)
                    if head and head.host == here and is_launcher_alive(head):
                        yield head


def read_all_records() -> Iterator[RunRecord]:
    """Read the records of all runs, the latest first."""
    yield from filter(None, map(read_run_record, list_runs()))


def read_unfinished_records() -> Iterator[RunRecord]:
    """Read the records of the runs whose end is not recorded, and of those without node 0's record, latest first."""
    yield from filter(None, (read_run_record(each.name) for each in list_folders() if not each.is_over))


def read_run_head(name: str) -> RunRecord | None:
    """Read the first line of a run's record: of the lowest node rank that has a record in this history."""
    folder = run_dir(name)
    files = (file for file in list_dir(folder) if file.startswith("node-") and file.endswith(".jsonl"))
    heads = (read_record_head(os.path.join(folder, file), name) for file in files)
    return min(filter(None, heads), key=lambda each: (each.node_rank, each.began), default=None)


def read_all_heads() -> Iterator[RunRecord]:
    """Read the first line of each run's record, the latest run first."""
    yield from filter(None, map(read_run_head, list_runs()))


def may_be_running(name: str) -> bool:
    """Whether a run still runs, here or on another machine, as far as its records show."""
    return any(map(_node_may_be_running, read_node_records(name)))


def hosts_elsewhere(records: Iterable[RunRecord]) -> list[str]:
    """List the other machines on which launchers of a run still run, as far as their records show."""
    return sorted({each.host for each in records if each.fate is RunState.RUNNING and each.host != host_name()})


def last_known_moment(name: str) -> float:
    """Return when a run ended or was last seen, in seconds since the epoch; 0 without a record."""
    return max((each.last_seen for each in read_node_records(name)), default=0.0)


def remove_run(name: str) -> bool:
    """Delete a run that has ended; return whether all of its files are gone."""
    if may_be_running(name):
        return False
    shutil.rmtree(run_dir(name), ignore_errors=True)
    return not os.path.lexists(run_dir(name))


def _node_may_be_running(record: RunRecord) -> bool:
    here = record.host == host_name()
    return record.fate is RunState.RUNNING and (here or time.time() - record.began < REMOTE_RUN_TIMEOUT_S)


def prune() -> None:
    """Delete the oldest runs, if there are too many or they take too many bytes.

    A launcher exits only after this: after CLEANUP_TIMEOUT_S the remaining runs are left to the next launcher.
    """
    deadline = time.monotonic() + CLEANUP_TIMEOUT_S
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
        if time.monotonic() > deadline:
            return
        remove_run(name)


def run_size(name: str) -> int:
    """Return the bytes of all files of a run, including the files in its folders."""
    return _folder_size(run_dir(name), depth=1)


def _folder_size(path: str, depth: int) -> int:
    try:
        with os.scandir(path) as entries:
            return sum(
                _folder_size(each.path, depth - 1)
                if depth and each.is_dir(follow_symlinks=False)
                else each.stat(follow_symlinks=False).st_size
                for each in entries
            )
    except OSError:
        return 0
