"""One inspection of this node's ranks: process states, stacks and collectives, of all at once, in a bounded time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.safe_files import current_folder
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.agent.rank_channel import RankChannel
from ddplaunch.core.isolation import IsolatedLoop
from ddplaunch.observe.diagnosis.flight_recorder import (
    name_groups,
    parse_call,
    parse_group_counts,
    parse_last_collectives,
    parse_states,
    states_without_recorder,
)
from ddplaunch.observe.diagnosis.flight_recorder_arrivals import operations_per_rank, parse_arrivals
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection, ProcessCondition, RankInspection
from ddplaunch.observe.diagnosis.rank_position import (
    DATALOADER_WAIT_TEXT,
    WAITS_FOR_CHILDREN,
    describe_other_wait,
)
from ddplaunch.observe.diagnosis.stack_parser import find_stage, parse_dump
from ddplaunch.observe.diagnosis.waits import ranks_to_query
from ddplaunch.observe.node import dataloader_workers
from ddplaunch.observe.node.dataloader_workers import DataLoaderWorkers
from ddplaunch.observe.node.rank_stack_dump import (
    ENDING_ERROR,
    NO_SIGNAL_ERROR,
    REPLACED_ERROR,
    SIGNAL_WAIT_ERROR,
    RankStackDump,
)
from ddplaunch.observe.node.system_calls import ends_at_any_signal, read_sleeps
from ddplaunch.system.processes.proc_utils import read_stat
from ddplaunch.system.target.target import TargetKind

NOT_BEGUN = "its program has not started yet"
RECHECK_INTERVAL_S = 0.1  # between the two reads of the collectives: a rank that moves is not waiting
READ_TIMEOUT_S = 0.3  # for a read, and more for each rank: one that holds the GIL never replies
READ_TIMEOUT_PER_RANK_S = 0.01
SIGNAL_CHECK_TIMEOUT_S = 0.05  # for a rank to confirm that it handles the stack signals; one that holds the GIL cannot
DETAILS_TIMEOUT_S = 1.0  # for the last collectives, which a rank takes up to 0.4 s to serialize
EXIT_STATUS_TIMEOUT_S = 1.0  # for the exit status of a rank, which the kernel gives to its parent, the zygote, alone
_MAX_ROUNDS = 4  # two reads, and details twice
_POLL_INTERVAL_S = 0.002  # between two checks whether the dumps are complete
_CONDITION_BY_STATE = {"T": ProcessCondition.STOPPED, "t": ProcessCondition.STOPPED, "D": ProcessCondition.BLOCKED}
_CONDITION_BY_DUMP_ERROR = {REPLACED_ERROR: ProcessCondition.REPLACED, ENDING_ERROR: ProcessCondition.ENDING}
_TICK = os.sysconf("SC_CLK_TCK")


class RankReply(Struct, frozen=True):
    """A rank's reply about its collectives: whether it has a process group, and torch's JSON (``inspect_side.py``)."""

    initialised: bool
    groups: bytes  # an array for each group, in the order of creation (JSON, from torch)
    call: bytes  # the function of torch.distributed that it is in
    traces: tuple[bytes, ...]  # of its flight recorders
    outer: bytes = b""  # the outer frames of a deep stack, as a dump has them

    @classmethod
    def parse(cls, line: bytes) -> RankReply:
        """Parse a reply; ValueError: it is malformed."""
        initialised, groups, call, *traces = line.split(b"\t")
        call, _, outer = call.partition(b"|")
        return cls(initialised == b"1", groups, call, tuple(traces), outer.replace(b"\r", b"\n"))


class RankInspector:
    """Inspects the ranks of a node once, from ``begin`` until ``on_done`` is called."""

    def __init__(
        self,
        loop: IsolatedLoop,
        ranks: NodeRanks,
        detail: Detail,
        on_done: Callable[[Inspection], None],
        *,
        timeout_s: float,
    ) -> None:
        """``on_done`` is called once, by the loop, after ``timeout_s`` seconds at the latest."""
        self._loop, self._ranks, self._detail, self._on_done = loop, ranks, detail, on_done
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s
        self._round = 0
        self._found: dict[int, RankInspection] = {}
        self._pending: dict[int, RankChannel] = {}  # those that have not replied yet
        self._counts: dict[int, bytes] = {}  # of the groups of each rank, in the first read
        self._outer: dict[int, bytes] = {}  # the outer frames of ranks whose stack is deep
        self._dumps: dict[int, RankStackDump] = {}
        self._unconfirmed: set[int] = set()  # ranks that have not confirmed that they handle the stack signals
        self._workers: dict[int, DataLoaderWorkers] = {}

    def begin(self) -> None:
        for rank in self._ranks.plan.local_ranks:
            self._found[rank.rank] = self._read_process_state(rank.rank)
        if self._detail in (Detail.STATE, Detail.WAITS):
            self._read_sleeps()  # before a stack signal interrupts them
        if self._detail in (Detail.STACKS, Detail.WAITS):
            self._start_dumps()
        if self._detail is Detail.LATENESS:
            return self._read_collectives(self._finish, only=tuple(self._found))
        self._read_collectives(self._on_first_reading)

    def _read_process_state(self, number: int) -> RankInspection:
        host = self._ranks.plan.rank_of(number).host or ""
        process = self._ranks.processes.get(number)
        if process is None:
            code = self._ranks.exit_codes.get(number)
            is_pending = code is None and self._ranks.attempt.not_spawned > 0
            gone = ProcessCondition.PENDING if is_pending else ProcessCondition.EXITED
            return RankInspection(number, host, 0, gone, code, ended=self._ranks.ends.get(number))
        if not (fields := read_stat(process.pid)):
            return RankInspection(number, host, process.pid, ProcessCondition.EXITED)
        condition = _CONDITION_BY_STATE.get(fields[0].decode(), ProcessCondition.ALIVE)
        condition = ProcessCondition.EXITED if fields[0] in b"ZX" and fields[17] == b"1" else condition
        cpu = sum(map(int, fields[11:15])) / _TICK
        return RankInspection(number, host, process.pid, condition, cpu=cpu)

    def _read_sleeps(self) -> None:
        pids = {rank: process.pid for rank, process in self._ranks.processes.items()}
        for rank, sleep in read_sleeps(pids, self._ranks.plan.master_port).items():
            found = self._found[rank]
            self._found[rank] = replace(found, awaits=sleep.awaits, asleep=sleep.description, lock_holder=sleep.holder)

    # ----------------------------------------------------------------------------------------------------------- stacks

    def _start_dumps(self) -> None:
        for number, found in self._found.items():
            if (
                found.condition in (ProcessCondition.EXITED, ProcessCondition.PENDING)
                or number not in self._ranks.processes
            ):
                continue
            if why := why_not_inspectable(self._ranks, number):
                self._found[number] = replace(found, no_stack=why)
            elif self._ranks.channels[number].has_thread and found.condition is not ProcessCondition.STOPPED:
                self._unconfirmed.add(number)
            else:
                self._start_dump(number)

    def _start_dump(self, number: int) -> None:
        self._unconfirmed.discard(number)
        if process := self._ranks.processes.get(number):
            channel = self._ranks.channels[number]
            if self._detail is Detail.WAITS and not channel.has_thread:
                channel.write_line(b"n")  # to record the exception that it is handling; the thread does so anyway
            self._dumps[number] = RankStackDump(
                process, channel.stack_signals, channel.stacks_fd, self._found[number].condition
            )

    # ------------------------------------------------------------------------------------------------------ collectives

    def _read_collectives(self, then: Callable[[], None], only: tuple[int, ...] | None = None) -> None:
        """Request the state of all ranks, or details of ``only`` some; call ``then`` after all replies or a timeout."""
        self._round += 1
        self._pending.clear()
        for number, channel in self._ranks.channels.items():
            if number in self._ranks.processes and (only is None or number in only):
                channel.read_pending()
                if channel.has_thread and self._found[number].condition is not ProcessCondition.STOPPED:
                    self._pending[number] = channel
        for number, channel in self._pending.items():
            on_reply = self._loop.guard(partial(self._on_reply, number))
            # "e": also its last collectives, and all frames of its main thread
            is_plain = only is None and not ends_at_any_signal(self._ranks.processes[number].pid)
            channel.request(b"s" if is_plain else b"e", on_reply)
        timeout_s = READ_TIMEOUT_S + READ_TIMEOUT_PER_RANK_S * len(self._found) if only is None else DETAILS_TIMEOUT_S
        deadline = min(time.monotonic() + timeout_s, self._deadline)
        self._poll_replies(deadline, then)

    def _poll_replies(self, deadline: float, then: Callable[[], None]) -> None:
        """Wait for replies and dumps."""
        for number in tuple(self._unconfirmed):
            if number not in self._pending or time.monotonic() - self._began > SIGNAL_CHECK_TIMEOUT_S:
                self._start_dump(number)
        waiting = [number for number in self._pending if number in self._ranks.processes]
        dumping = any([dump.poll() for dump in self._dumps.values()])
        dumping |= any([workers.poll() for workers in self._workers.values()])
        if (waiting or dumping) and time.monotonic() < deadline:
            self._loop.call_later(_POLL_INTERVAL_S, lambda: self._poll_replies(deadline, then))
            return
        for number, channel in self._pending.items():
            channel.clear_reply_handler()
            found = self._found[number]
            if self._round == 1 and number in self._ranks.processes:
                self._found[number] = replace(found, answers=False)
        self._pending.clear()
        then()

    def _on_reply(self, number: int, line: bytes) -> None:
        try:
            reply = RankReply.parse(line)
        except ValueError:
            return  # the program has written to the channel
        if self._pending.pop(number, None) is None:
            return
        self._ranks.channels[number].clear_reply_handler()
        if number in self._unconfirmed:
            self._start_dump(number)
        found = self._found[number]
        try:
            if self._detail is Detail.LATENESS:
                most = operations_per_rank(self._ranks.plan.world_size)
                arrivals = [each for trace in reply.traces for each in parse_arrivals(number, trace, most)]
                found = replace(found, answers=reply.initialised or None, arrivals=tuple(arrivals))
            elif self._round == 1:
                self._counts[number], self._outer[number] = reply.groups, reply.outer
                found = apply_group_states(found, reply)
            elif self._round == 2:
                again = apply_group_states(found, reply)
                if number not in self._counts:  # its first reply: there is nothing to compare it with
                    found = again
                else:
                    moved = again.groups != found.groups or reply.groups != self._counts[number]
                    found = replace(found, groups=again.groups, moved=moved, inside=again.inside)
            else:
                found = apply_last_collectives(found, reply)
        except (ValueError, TypeError):  # the program has written to the channel
            found = replace(found, answers=None)
        self._found[number] = found

    def _on_first_reading(self) -> None:
        self._collect_stacks()
        for number, found in self._found.items():
            process, channel = self._ranks.processes.get(number), self._ranks.channels.get(number)
            if process and channel and (words := describe_other_wait(found)) in WAITS_FOR_CHILDREN:
                of_loader = words == DATALOADER_WAIT_TEXT
                self._workers[number] = DataLoaderWorkers(process, channel, of_loader=of_loader)
        deadline = min(time.monotonic() + dataloader_workers.TOTAL_TIMEOUT_S, self._deadline)
        self._poll_replies(deadline, self._collect_worker_stacks)

    def _collect_worker_stacks(self) -> None:
        for number, workers in self._workers.items():
            workers.give_up()
            self._found[number] = replace(self._found[number], workers=tuple(workers.found))
        self._workers.clear()
        any_state = any(found.groups or found.inside for found in self._found.values())
        if self._detail is not Detail.WAITS or not any_state:
            return self._finish()
        pause = max(0.0, min(self._began + RECHECK_INTERVAL_S, self._deadline) - time.monotonic())
        self._loop.call_later(pause, lambda: self._read_collectives(self._on_second_reading))

    def _on_second_reading(self) -> None:
        """Request the last collectives of the ranks that decide who waits for whom; of more ranks where needed."""
        wanted = ranks_to_query(self._build_inspection())
        if wanted and self._round < _MAX_ROUNDS:
            self._read_collectives(self._on_second_reading, only=wanted)
        else:
            self._finish()

    def _collect_stacks(self) -> None:
        for number, dump in self._dumps.items():
            dump.give_up()
            if dump.why_not == NO_SIGNAL_ERROR:
                # Not again: what the program prints about the signal would look like progress.
                self._ranks.channels[number].stack_signals = (0, 0)
            found, outer = self._found[number], self._outer.get(number, b"")
            if dump.why_not == SIGNAL_WAIT_ERROR and outer:  # they begin at the innermost frame
                dump.why_not, dump.text, outer = "", outer.replace(b"Outer frames", b"Current thread 0x0"), b""
            threads = parse_dump(dump.text, current_folder(), outer=outer) if dump.text else ()
            condition = _CONDITION_BY_DUMP_ERROR.get(dump.why_not, found.condition)
            self._found[number] = replace(
                found,
                condition=condition,
                threads=threads,
                no_stack=dump.why_not,
                outside=find_stage(dump.text or b"", threads),
            )
        self._dumps.clear()

    def _finish(self) -> None:
        self._deadline = min(self._deadline, time.monotonic() + EXIT_STATUS_TIMEOUT_S)
        self._collect_exit_statuses()

    def _collect_exit_statuses(self) -> None:
        """Finish once the exit codes of all ranks that have ended are known."""
        awaited = False
        for number, found in self._found.items():
            state = self._read_process_state(number)
            if state.condition is ProcessCondition.EXITED:
                self._found[number] = replace(
                    found, condition=ProcessCondition.EXITED, code=state.code, ended=state.ended
                )
                awaited |= number in self._ranks.processes
        if awaited and time.monotonic() < self._deadline:
            self._loop.call_later(_POLL_INTERVAL_S, self._collect_exit_statuses)
        else:
            self._on_done(self._build_inspection())

    def _build_inspection(self) -> Inspection:
        plan = self._ranks.plan
        found = tuple(self._found[number] for number in sorted(self._found))
        return Inspection(time.time(), found, plan.world_size)


def why_not_inspectable(ranks: NodeRanks, rank: int) -> str:
    """Return why a rank cannot be inspected, for users; "" if it can."""
    channel = ranks.channels.get(rank)
    if channel is None:
        program = ranks.plan.target.kind is TargetKind.PROGRAM
        return "it is not a Python program" if program else "inspection is disabled (--no-inspect)"
    channel.read_pending()
    return "" if channel.is_ready else NOT_BEGUN


def apply_group_states(found: RankInspection, reply: RankReply) -> RankInspection:
    """Return the inspection with the states of the rank's groups. ValueError or TypeError: the reply is malformed."""
    known = parse_group_counts(reply.groups)
    found = replace(found, inside=parse_call(reply.call))
    groups = tuple(state for trace in reply.traces for state in name_groups(parse_states(trace), known))
    if not groups and any(count > 0 for count in known.values()):  # an older torch, or a recorder without a buffer
        return replace(found, answers=None, groups=states_without_recorder(known))
    return replace(found, answers=True if reply.initialised and reply.traces else None, groups=groups)


def apply_last_collectives(found: RankInspection, reply: RankReply) -> RankInspection:
    """Return the inspection with the rank's last collectives. ValueError or TypeError: the reply is malformed."""
    groups, known = apply_group_states(found, reply).groups, parse_group_counts(reply.groups)
    unused = {group.group for group, count in known.items() if count == 0}  # recorded are those of a destroyed group
    recorded = (each for trace in reply.traces for each in parse_last_collectives(trace))
    last = tuple(each for each in recorded if each.group not in unused)
    used = {each.group for each in groups} | {each.group for each in last}
    return replace(found, last=last, known=tuple(each for each in known if each.group in used))
