"""The evidence of a stall in the launcher of one node: when it is collected, where it is kept, what users see of it.

It is collected when a stall is reported, and, at node 0's request, before the ranks of a stalled attempt are stopped.
Its folder is ``stall`` in the folder of ``--log-dir``, or else in the run's folder of the history; for a later attempt
it is ``stall.attempt-1``. A later stall of the same attempt replaces the evidence.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.base.event_loop import Callback, EventLoop
from ddplaunch.base.text import format_count, join_names
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.events import AttemptSwept, Event, JobStalled, NoteAdded, RanksInspected
from ddplaunch.core.feature import FeatureContext, NodeSide
from ddplaunch.core.messages import RpcRequest
from ddplaunch.core.output.run_log import attempt_suffix
from ddplaunch.core.rpc_kind import Reply
from ddplaunch.features.runs.history_recorder import HistoryRecorder

if TYPE_CHECKING:
    from ddplaunch.features.nccl.ras_report import RasReport
    from ddplaunch.features.nccl.stall_files import StallFiles
    from ddplaunch.observe.diagnosis.inspection import Inspection

_MAX_ATTEMPTS = 4  # of a job: the evidence of no more attempts is kept


class StallSide(NodeSide):
    """The node side: keeps evidence about this node's ranks; node 0 adds the stacks of all ranks and the RAS report."""

    def __init__(self, context: FeatureContext) -> None:
        self._context, self._history = context, context.find(HistoryRecorder)
        self._ranks: NodeRanks | None = None  # of the current attempt, like the fields below
        self._inspection: Inspection | None = None  # of all ranks, for node 0
        self._is_stopping = False
        self._waiting: list[Callback] | None = None  # called at the end of the collection; None: none is running
        self._collected: StallFiles | None = None  # until ``_report`` has shown it
        self._notes: list[str] = []  # shown after the result of the job
        self._kept_note = ""  # has the path of the last folder; also shown after the result
        self._bytes: dict[int, int] = {}  # by attempt: the size of its dumps
        context.job.rpc.handlers["stall"] = context.loop.guard(self._answer)

    @property
    def _is_node_zero(self) -> bool:
        return self._ranks is not None and self._ranks.plan.node_rank == 0

    def on_attempt_start(self, ranks: NodeRanks) -> None:
        self._ranks, self._inspection, self._collected = ranks, None, None
        self._is_stopping, self._waiting = False, None

    def observe(self, event: Event) -> None:
        match event:
            case JobStalled(text=text) if text and self._ranks is not None:
                self._inspection = None
                self._collect_evidence(self._context.loop, self._ranks, self._inspect)
            case RanksInspected(inspection=inspection):
                self._on_inspected(inspection)
            case AttemptSwept():
                self._report()

    def _answer(self, loop: EventLoop, ranks: NodeRanks, request: RpcRequest, reply: Reply) -> None:
        """Called on node 0's request: collect the evidence, then reply; node 0 then stops the ranks."""
        from ddplaunch.features.nccl.rpc import StallReply

        self._is_stopping = True
        self._collect_evidence(loop, ranks, lambda: reply(StallReply(), True))

    def _inspect(self) -> None:
        from ddplaunch.observe.diagnosis.inspection import Detail
        from ddplaunch.observe.rpc import inspect_job

        if self._is_node_zero and self._collected is not None:
            inspect_job(self._context.job.rpc, Detail.WAITS, self._context.loop.guard(self._on_inspected))

    def _collect_evidence(self, loop: EventLoop, ranks: NodeRanks, on_done: Callback) -> None:
        """Collect the evidence, and call ``on_done`` once: when it is complete, or at once if none can be collected."""
        if self._waiting is not None:
            self._waiting.append(on_done)
            return
        from ddplaunch.features.nccl.ras_client import find_address
        from ddplaunch.features.nccl.stall_files import MAX_NODE_BYTES, StallFiles

        number, folder = ranks.number, self._find_folder(ranks.number)
        left = MAX_NODE_BYTES - sum(size for attempt, size in self._bytes.items() if attempt != number)
        is_full = number not in self._bytes and len(self._bytes) >= _MAX_ATTEMPTS
        if folder is None or is_full:
            on_done()
            return
        waiting = [on_done]

        def on_collected(files: StallFiles) -> None:
            self._bytes[number] = files.dump_bytes
            is_current = ranks is self._ranks  # or the next attempt has begun
            if is_current:
                self._collected, self._waiting = files, None
            for each in waiting:
                each()
            if is_current and self._inspection is not None:
                self._report()

        address = find_address(os.environ) if self._is_node_zero and _is_nccl_likely(ranks) else None
        try:
            StallFiles(loop, ranks, folder, address, on_collected).begin(left)
        except OSError:  # the disk is full, or the folder is not writable
            on_done()
        else:
            self._waiting = waiting

    def _find_folder(self, attempt: int) -> str | None:
        parent = self._context.log.path or (self._history and self._history.path)
        return os.path.join(parent, f"stall{attempt_suffix(attempt)}") if parent else None

    def _on_inspected(self, inspection: Inspection) -> None:
        self._inspection = inspection
        self._report()

    def _report(self) -> None:
        """Add the stacks to the evidence, and note its folder for the user; called once both exist, or no rank runs."""
        files, self._collected = self._collected, None
        if files is None or not self._is_node_zero:
            return
        names = []
        if files.dumped:
            names.append(f"dumps of the flight recorder of {format_count(len(files.dumped), 'rank')}")
        if self._inspection is not None:
            remarks = [_compare(files.ras, self._inspection)] if files.ras is not None else []
            names += ["stacks.txt"] if files.write_stacks(self._inspection, *remarks) else []
            for text in remarks:
                self._notes.append(text) if self._is_stopping else self._context.job.emit(NoteAdded(text))
        if files.ras_file:
            names.append(files.ras_file)
        if names:
            self._kept_note = f"kept in {files.folder}: {join_names(names)}"

    def finish(self) -> None:
        is_named = self._context.log.path is not None  # the log folder, which the launcher names anyway
        for text in (*self._notes, *([self._kept_note] if self._kept_note and not is_named else [])):
            self._context.screen.show_note(text)


def _compare(report: RasReport, inspection: Inspection) -> str:
    from ddplaunch.features.nccl.ras_report import compare

    return compare(report, inspection)


def _is_nccl_likely(ranks: NodeRanks) -> bool:
    """Whether the ranks have GPUs, or the user has named the address of the RAS service."""
    from ddplaunch.features.nccl.ras_client import ADDRESS_VARIABLE

    return ADDRESS_VARIABLE in os.environ or any(rank.device.startswith("cuda") for rank in ranks.plan.local_ranks)
