"""The readings of a run in its history: a file for each node, appended to as they come, thinned when it is full."""

from __future__ import annotations

import json
import os

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass
from ddplaunch.files import read_file_and_owner

if TYPE_CHECKING:
    from threading import Thread

    from ddplaunch.agent.readings import CounterSnapshot
    from ddplaunch.diagnosis.readings import NodeSample
    from ddplaunch.job.history import HistoryRecorder
    from ddplaunch.plan.plan import Plan
    from ddplaunch.wire.bounds import Count, TextLine

MAX_BYTES = 3 << 19  # of a file, however long the run: 1.5 MiB
_MAX_TIME = 1e11  # seconds since the epoch: beyond all calendars
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def sample_file_name(node_rank: int) -> str:
    """What the file of a node is called."""
    return f"readings-{node_rank}.jsonl"


def plan_file_name(node_rank: int) -> str:
    """What the file of its plan is called."""
    return f"plan-{node_rank}.json"


@dataclass(frozen=True)
class SavedPlan:
    """What is kept of a node's plan, that of its last attempt."""

    facts: tuple[tuple[TextLine, TextLine, TextLine], ...]  # each with its value, and where that is from
    ranks: tuple[tuple[Count, TextLine, TextLine], ...]  # of this node: the device, and the CPUs where these are chosen
    variables: tuple[tuple[TextLine, TextLine], ...]  # alike on all ranks of this node

    @classmethod
    def of(cls, plan: Plan) -> SavedPlan:
        facts = tuple((each.name, each.value, each.source) for each in plan.facts)
        ranks = tuple((each.rank, each.device, ",".join(map(str, each.cpus or ()))) for each in plan.local_ranks)
        return cls(facts, ranks, tuple(plan.shared_environment.items()))


class SampleFile:
    """Keeps the readings of one node, where the run has a history.

    A thread writes them, one at a time: where a disk hangs, as a home on the network may, the launcher goes on.
    """

    def __init__(self, history: HistoryRecorder) -> None:
        self._history = history
        self._size = 0
        self._planned = -1  # the attempt whose plan is kept
        self._troubled = False
        self._writer: Thread | None = None

    def on_sample(self, look: CounterSnapshot, reading: NodeSample | None) -> None:
        """Keep a reading, unless the one before is still being written."""
        folder = self._history.folder
        if reading is None or not reading.ranks or folder is None or self._troubled:
            return
        if self._writer is None or not self._writer.is_alive():
            from threading import Thread

            self._writer = Thread(target=self._write_sample, args=(os.dup(folder), look.plan, reading), daemon=True)
            self._writer.start()

    def _write_sample(self, folder: int, plan: Plan, reading: NodeSample) -> None:
        """Write it, in a thread, and close ``folder``; a full disk ends that, and harms nobody."""
        line, name = reading.to_json().encode(), sample_file_name(plan.node_rank)
        try:
            if self._size + len(line) > MAX_BYTES:
                self._compact(folder, name)
            with os.fdopen(os.open(name, _FLAGS | os.O_APPEND, 0o600, dir_fd=folder), "wb", 0) as file:
                self._size += file.write(line)
            if self._planned != reading.attempt:
                self._planned = reading.attempt
                self._write_plan(folder, plan)
        except OSError:
            self._troubled = True
        finally:
            os.close(folder)

    def _write_plan(self, folder: int, plan: Plan) -> None:
        name = plan_file_name(plan.node_rank)
        with os.fdopen(os.open(name, _FLAGS | os.O_TRUNC, 0o600, dir_fd=folder), "w", encoding="utf-8") as file:
            json.dump(vars(SavedPlan.of(plan)), file)

    def _compact(self, folder: int, name: str) -> None:
        """Write the file anew with half of its readings, and put it in the place of the old one."""
        from ddplaunch.diagnosis.readings import downsample

        with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
            found = parse_samples(file.read(2 * MAX_BYTES))
        lines = [each.to_json() for each in downsample(found, len(found) // 2)]
        draft = f".{name}"
        try:
            with os.fdopen(os.open(draft, _FLAGS | os.O_TRUNC, 0o600, dir_fd=folder), "wb") as file:
                self._size = file.write("".join(lines).encode())
        except OSError:  # the disk is full
            os.unlink(draft, dir_fd=folder)
            raise
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)


def parse_samples(data: bytes) -> list[NodeSample]:
    """The readings in a file, without the lines that make no sense: it may be torn."""
    import msgspec

    from ddplaunch.diagnosis.readings import NodeSample
    from ddplaunch.wire import typed

    found = []
    for line in data.splitlines():
        try:
            found.append(typed.parse(line, NodeSample))
        except (msgspec.MsgspecError, RecursionError):
            continue
    return [each for each in found if 0 <= each.seconds <= each.time <= _MAX_TIME]


def read_samples(path: str) -> list[NodeSample]:
    """The readings in this file of this user's own history; none where there is no such file."""
    try:
        data, owner = read_file_and_owner(path, 2 * MAX_BYTES, follow_symlinks=False)
    except OSError:
        return []
    return parse_samples(data) if owner == os.geteuid() else []


def read_plan(path: str) -> SavedPlan | None:
    """The plan in this file of this user's own history; None where there is none."""
    from ddplaunch.wire.frames import ProtocolError
    from ddplaunch.wire.typed import convert

    try:
        data, owner = read_file_and_owner(path, MAX_BYTES, follow_symlinks=False)
        plan: SavedPlan = convert(json.loads(data), SavedPlan)
    except (OSError, ValueError, ProtocolError, RecursionError):
        return None
    return plan if owner == os.geteuid() else None
