"""Inspects this node's ranks once, all at the same time and with a timeout: process states, stacks and collectives.

``InspectionMachine`` decides; this file feeds events to it, and executes its commands.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from ddplaunch.base.safe_files import current_folder
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.isolation import IsolatedLoop
from ddplaunch.core.machine import Command
from ddplaunch.core.machine_driver import MachineDriver
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection, ProcessCondition, RankInspection
from ddplaunch.observe.node import inspection_machine as machine
from ddplaunch.observe.node.dataloader_workers import WorkerStackDumps
from ddplaunch.observe.node.inspection_machine import InspectionMachine
from ddplaunch.observe.node.rank_reply import RankReply
from ddplaunch.observe.node.rank_stack_dump import NO_SIGNAL_ERROR, RankStackDump
from ddplaunch.observe.node.system_calls import ends_at_any_signal, read_blocking_calls
from ddplaunch.system.processes.proc_utils import read_stat
from ddplaunch.system.target.target import TargetKind

NOT_BEGUN = "its program has not started yet"
_POLL_INTERVAL_S = 0.002  # between two checks whether the dumps are complete
_CONDITION_BY_STATE = {"T": ProcessCondition.STOPPED, "t": ProcessCondition.STOPPED, "D": ProcessCondition.BLOCKED}
_TICK = os.sysconf("SC_CLK_TCK")


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
        began, folder = time.monotonic(), current_folder()
        inspection = InspectionMachine(detail, ranks.plan.world_size, folder, began=began, timeout_s=timeout_s)
        self._post = MachineDriver(loop, inspection, self._execute).post
        self._dumps: dict[int, RankStackDump] = {}
        self._workers: dict[int, WorkerStackDumps] = {}

    def begin(self) -> None:
        inspected = {rank.rank: self._read_process_state(rank.rank) for rank in self._ranks.plan.local_ranks}
        if self._detail in (Detail.STATE, Detail.WAITS):
            self._add_blocking_calls(inspected)  # before a stack signal interrupts them
        channels = self._ranks.channels
        with_thread, reasons = frozenset[int](), dict[int, str]()
        if self._detail in (Detail.STACKS, Detail.WAITS):
            reasons = {rank: why for rank in self._alive if (why := why_not_inspectable(self._ranks, rank))}
            with_thread = frozenset(rank for rank in self._alive - reasons.keys() if channels[rank].has_thread)
            for rank in self._alive - reasons.keys() - with_thread:  # without a process group
                library = _find_communication_library(self._ranks.processes[rank].pid)
                inspected[rank] = replace(inspected[rank], library=library)
        self._post(machine.InspectionBegun(inspected, self._alive, with_thread, reasons))

    @property
    def _alive(self) -> frozenset[int]:
        return frozenset(self._ranks.processes)

    def _execute(self, command: Command) -> None:
        match command:
            case machine.StartDump(rank=rank, condition=condition):
                self._start_dump(rank, condition)
            case machine.Request(ranks=ranks, details=details):
                self._request(ranks, details=details)
            case machine.StopAwaitingReplies(ranks=ranks):
                for rank in self._ranks.channels.keys() & ranks:
                    self._ranks.channels[rank].clear_reply_handler()
            case machine.Poll(later=True):
                self._loop.call_later(_POLL_INTERVAL_S, self._poll)
            case machine.Poll():
                self._poll()
            case machine.CollectDumps():
                self._collect_dumps()
            case machine.StartWorkerDumps(rank=rank, of_loader=of_loader):
                process, channel = self._ranks.processes[rank], self._ranks.channels[rank]
                self._workers[rank] = WorkerStackDumps(process, channel, of_loader=of_loader)
            case machine.CollectWorkerDumps():
                for workers in self._workers.values():
                    workers.give_up()
                self._post(
                    machine.WorkerDumpsCollected({rank: tuple(each.inspected) for rank, each in self._workers.items()})
                )
                self._workers.clear()
            case machine.ReadStates(later=True):
                self._loop.call_later(_POLL_INTERVAL_S, self._read_states)
            case machine.ReadStates():
                self._read_states()
            case machine.FinishInspection(inspection=inspection):
                self._on_done(inspection)
            case _:
                raise AssertionError(command)

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

    def _add_blocking_calls(self, found: dict[int, RankInspection]) -> None:
        pids = {rank: process.pid for rank, process in self._ranks.processes.items()}
        for rank, sleep in read_blocking_calls(pids, self._ranks.plan.master_port).items():
            found[rank] = replace(found[rank], awaits=sleep.awaits, asleep=sleep.description, lock_holder=sleep.holder)

    def _start_dump(self, number: int, condition: ProcessCondition) -> None:
        if process := self._ranks.processes.get(number):
            channel = self._ranks.channels[number]
            if self._detail is Detail.WAITS and not channel.has_thread:
                channel.write_line(b"n")  # to record the exception that it is handling; the thread does so anyway
            self._dumps[number] = RankStackDump(process, channel.stack_signals, channel.stacks_fd, condition)

    def _request(self, ranks: tuple[int, ...], *, details: bool) -> None:
        asked = []
        for number in ranks:
            channel = self._ranks.channels.get(number)
            if channel is not None and number in self._ranks.processes:
                channel.read_pending()
                if channel.has_thread:
                    asked.append((number, channel))
        for number, channel in asked:
            on_reply = self._loop.guard(partial(self._on_reply, number))
            # "e": also its last collectives, and all frames of its main thread
            is_plain = not details and not ends_at_any_signal(self._ranks.processes[number].pid)
            channel.request(b"s" if is_plain else b"e", on_reply)
        self._post(machine.StatesRequested(frozenset(number for number, _ in asked)))

    def _on_reply(self, number: int, line: bytes) -> None:
        try:
            reply = RankReply.parse(line)
        except ValueError:
            return  # the program has written to the channel
        self._post(machine.RankReplied(number, reply))

    def _poll(self) -> None:
        is_dumping = any([dump.poll() for dump in self._dumps.values()])
        is_dumping |= any([workers.poll() for workers in self._workers.values()])
        self._post(machine.DumpsPolled(self._alive, is_dumping))

    def _collect_dumps(self) -> None:
        collected = {}
        for number, dump in self._dumps.items():
            dump.give_up()
            if dump.why_not == NO_SIGNAL_ERROR:
                # Not again: what the program prints about the signal would look like progress.
                self._ranks.channels[number].stack_signals = (0, 0)
            collected[number] = machine.StackDump(dump.text, dump.why_not)
        self._dumps.clear()
        self._post(machine.DumpsCollected(collected, self._alive & self._ranks.channels.keys()))

    def _read_states(self) -> None:
        states = {rank.rank: self._read_process_state(rank.rank) for rank in self._ranks.plan.local_ranks}
        ended = {rank: each for rank, each in states.items() if each.condition is ProcessCondition.EXITED}
        self._post(machine.StatesRead(ended, self._alive & ended.keys()))


def _find_communication_library(pid: int) -> str:
    """Return "torchcomms" if a process has loaded this communication library, which keeps its own records; else "".

    The kernel's list of mapped files is read, as the rank may be in a call of that library and not reply.
    """
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return "torchcomms" if b"/torchcomms/" in file.read() else ""
    except OSError:
        return ""


def why_not_inspectable(ranks: NodeRanks, rank: int) -> str:
    """Return why a rank cannot be inspected, for users; "" if it can."""
    channel = ranks.channels.get(rank)
    if channel is None:
        program = ranks.plan.target.kind is TargetKind.PROGRAM
        return "it is not a Python program" if program else "inspection is disabled (--no-inspect)"
    channel.read_pending()
    return "" if channel.is_ready else NOT_BEGUN
