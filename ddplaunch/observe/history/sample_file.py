"""The samples of a run in its history: one file for each node. Samples are appended; a full file is downsampled."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from threading import Thread

from msgspec import Struct

from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.safe_files import read_file_and_owner
from ddplaunch.base.types import Count, TextLine, as_dict, convert, parse
from ddplaunch.observe.samples.node import CounterSnapshot
from ddplaunch.observe.samples.sample import NodeSample, downsample
from ddplaunch.system.plan.plan import Plan

MAX_BYTES = 3 << 19  # of a file, however long the run: 1.5 MiB
_MAX_TIME = 1e11  # seconds since the epoch: later is invalid
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def sample_file_name(node_rank: int) -> str:
    """Return the name of a node's sample file."""
    return f"readings-{node_rank}.jsonl"


def plan_file_name(node_rank: int) -> str:
    """Return the name of the file with a node's plan."""
    return f"plan-{node_rank}.json"


class SavedPlan(Struct, frozen=True):
    """The recorded part of a node's plan, from its last attempt."""

    facts: tuple[tuple[TextLine, TextLine, TextLine], ...]  # name, value, source
    ranks: tuple[tuple[Count, TextLine, TextLine], ...]  # of this node: rank, device, CPUs ("" where not pinned)
    variables: tuple[tuple[TextLine, TextLine], ...]  # the environment, as far as it is equal on all ranks of this node

    @classmethod
    def from_plan(cls, plan: Plan) -> SavedPlan:
        facts = tuple((each.name, each.value, each.source) for each in plan.facts)
        ranks = tuple((each.rank, each.device, ",".join(map(str, each.cpus or ()))) for each in plan.local_ranks)
        return cls(facts, ranks, tuple(plan.shared_environment.items()))


class SampleFile:
    """Writes the samples of one node to a file in the run's history, if the run has a history.

    A thread writes them, one at a time: the launcher goes on if the disk hangs, as a home on the network may.
    """

    def __init__(self, open_folder: Callable[[], int | None]) -> None:
        """``open_folder`` returns the descriptor of the run's folder; None before its ranks start and after its end."""
        self._open_folder = open_folder
        self._size = 0
        self._plan_attempt = -1  # whose plan was written last
        self._has_failed = False
        self._writer: Thread | None = None

    def on_sample(self, snapshot: CounterSnapshot, sample: NodeSample | None) -> None:
        """Write a sample, unless the one before is still being written."""
        folder = self._open_folder()
        if sample is None or not sample.ranks or folder is None or self._has_failed:
            return
        if self._writer is None or not self._writer.is_alive():
            self._writer = Thread(target=self._write_sample, args=(os.dup(folder), snapshot.plan, sample), daemon=True)
            self._writer.start()

    def _write_sample(self, folder: int, plan: Plan, sample: NodeSample) -> None:
        """Write a sample, in a thread, and close ``folder``; after an error no further sample is written."""
        line, name = sample.to_json().encode(), sample_file_name(plan.node_rank)
        try:
            if self._size + len(line) > MAX_BYTES:
                self._compact_file(folder, name)
            with os.fdopen(os.open(name, _FLAGS | os.O_APPEND, 0o600, dir_fd=folder), "wb", 0) as file:
                self._size += file.write(line)
            if self._plan_attempt != sample.attempt:
                self._plan_attempt = sample.attempt
                self._write_plan(folder, plan)
        except OSError:
            self._has_failed = True
        finally:
            os.close(folder)

    def _write_plan(self, folder: int, plan: Plan) -> None:
        name = plan_file_name(plan.node_rank)
        with os.fdopen(os.open(name, _FLAGS | os.O_TRUNC, 0o600, dir_fd=folder), "w", encoding="utf-8") as file:
            json.dump(as_dict(SavedPlan.from_plan(plan)), file)

    def _compact_file(self, folder: int, name: str) -> None:
        """Replace the file by one with half as many samples."""

        with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
            samples = parse_samples(file.read(2 * MAX_BYTES))
        lines = [each.to_json() for each in downsample(samples, len(samples) // 2)]
        draft = f".{name}"
        try:
            with os.fdopen(os.open(draft, _FLAGS | os.O_TRUNC, 0o600, dir_fd=folder), "wb") as file:
                self._size = file.write("".join(lines).encode())
        except OSError:  # the disk is full
            os.unlink(draft, dir_fd=folder)
            raise
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)


def parse_samples(data: bytes) -> list[NodeSample]:
    """Parse the samples in a file; skip invalid lines, as the file may be truncated."""

    samples = []
    for line in data.splitlines():
        try:
            samples.append(parse(line, NodeSample))
        except ProtocolError:
            continue
    return [each for each in samples if 0 <= each.seconds <= each.time <= _MAX_TIME]


def read_samples(path: str) -> list[NodeSample]:
    """Read the samples in a file of the history; none if it is missing or belongs to another user."""
    try:
        data, owner = read_file_and_owner(path, 2 * MAX_BYTES, follow_symlinks=False)
    except OSError:
        return []
    return parse_samples(data) if owner == os.geteuid() else []


def read_plan(path: str) -> SavedPlan | None:
    """Read the plan in a file of the history; None if it is missing, invalid or another user's."""

    try:
        data, owner = read_file_and_owner(path, MAX_BYTES, follow_symlinks=False)
        plan = convert(json.loads(data), SavedPlan)
    except (OSError, ValueError, ProtocolError, RecursionError):
        return None
    return plan if owner == os.geteuid() else None
