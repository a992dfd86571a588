"""Asks the kernel and the ranks of this node what they are doing, all at once and in a bounded time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from ddplaunch.agent import loader_workers
from ddplaunch.agent.loader_workers import LoaderWorkers
from ddplaunch.agent.rank_line import RankAnswer, RankLine
from ddplaunch.agent.ranks import Ranks
from ddplaunch.agent.stack_dump import ENDING, REPLACED, TAKEN, StackDump
from ddplaunch.agent.system_calls import sleeps
from ddplaunch.dataclass import replace
from ddplaunch.diagnosis.arrivals import kept, read_trace
from ddplaunch.diagnosis.collectives import named, parse_call, parse_known, parse_last, parse_states, unrecorded
from ddplaunch.diagnosis.inspection import Condition, Detail, Inspection, RankInspection
from ddplaunch.diagnosis.stack_dump import parse_dump
from ddplaunch.diagnosis.standing import LOADER_WAIT, WAITS_FOR_CHILDREN, waiting_for
from ddplaunch.diagnosis.waits import needs
from ddplaunch.output.isolation import IsolatedLoop

AGAIN = 0.1  # seconds between the two readings of the collectives: who moves is not waiting
PATIENCE = 0.3  # seconds for a reading, and what each rank adds: one that holds the GIL never answers
PER_RANK = 0.01
SURE = 0.05  # seconds for a rank to say that the signals are ours; one that holds the GIL cannot
DETAILS_PATIENCE = 1.0  # seconds for the last collectives, which a rank takes up to 0.4 s to put into words
LAST_WORD = 1.0  # seconds for the zygote to say how a rank ended, which the kernel says to nobody else
_MAX_ROUNDS = 4  # two readings, and twice details
_POLL = 0.002  # seconds between two looks for the end of the dumps
_CONDITIONS = {"T": Condition.STOPPED, "t": Condition.STOPPED, "D": Condition.BLOCKED}
_TOLD_BY_SIGNALS = {REPLACED: Condition.REPLACED, ENDING: Condition.ENDING}
_TICK = os.sysconf("SC_CLK_TCK")


class Inspector:
    """One inspection of a node's ranks, from ``begin`` to its answer."""

    def __init__(
        self, loop: IsolatedLoop, ranks: Ranks, detail: Detail, answer: Callable[[Inspection], None], *, within: float
    ) -> None:
        """``answer`` is called once, by the loop, after ``within`` seconds at the latest."""
        self._loop, self._ranks, self._detail, self._answer = loop, ranks, detail, answer
        self._began = time.monotonic()
        self._until = self._began + within
        self._round = 0
        self._found: dict[int, RankInspection] = {}
        self._asked: dict[int, RankLine] = {}  # those whose answer is awaited
        self._counts: dict[int, bytes] = {}  # of the groups of each rank, in the first reading
        self._outer: dict[int, bytes] = {}  # the outer frames of ranks whose stack is deep
        self._dumps: dict[int, StackDump] = {}
        self._unsure: set[int] = set()  # ranks that are still to say whether the signals are ours
        self._workers: dict[int, LoaderWorkers] = {}

    def begin(self) -> None:
        for rank in self._ranks.plan.local_ranks:
            self._found[rank.rank] = self._kernels_word(rank.rank)
        if self._detail in (Detail.STATE, Detail.WAITS):
            self._read_sleeps()  # before a signal of ours interrupts them
        if self._detail in (Detail.STACKS, Detail.WAITS):
            self._dump()
        if self._detail is Detail.PACE:
            return self._read(self._end, only=tuple(self._found))
        self._read(self._read_once)

    def _kernels_word(self, number: int) -> RankInspection:
        host = self._ranks.plan.rank_of(number).host or ""
        process = self._ranks.processes.get(number)
        if process is None:
            code = self._ranks.codes.get(number)
            gone = Condition.PENDING if code is None and self._ranks.pending else Condition.EXITED
            return RankInspection(number, host, 0, gone, code, ended=self._ranks.ends.get(number))
        try:
            with open(f"/proc/{process.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return RankInspection(number, host, process.pid, Condition.EXITED)
        condition = _CONDITIONS.get(fields[0].decode(), Condition.ALIVE)
        condition = Condition.EXITED if fields[0] in b"ZX" and fields[17] == b"1" else condition
        cpu = sum(map(int, fields[11:15])) / _TICK
        return RankInspection(number, host, process.pid, condition, cpu=cpu)

    def _read_sleeps(self) -> None:
        pids = {rank: process.pid for rank, process in self._ranks.processes.items()}
        for rank, sleep in sleeps(pids, self._ranks.plan.master_port).items():
            found = self._found[rank]
            self._found[rank] = replace(found, awaits=sleep.awaits, asleep=sleep.words, lock_holder=sleep.holder)

    # ------------------------------------------------------------------------------------------------------ stacks

    def _dump(self) -> None:
        for number, found in self._found.items():
            if found.condition in (Condition.EXITED, Condition.PENDING) or number not in self._ranks.processes:
                continue
            if why := self._ranks.why_mute(number):
                self._found[number] = replace(found, no_stack=why)
            elif self._ranks.lines[number].answers and found.condition is not Condition.STOPPED:
                self._unsure.add(number)
            else:
                self._begin_dump(number)

    def _begin_dump(self, number: int) -> None:
        self._unsure.discard(number)
        if process := self._ranks.processes.get(number):
            line = self._ranks.lines[number]
            if self._detail is Detail.WAITS:
                line.request_exception()
            self._dumps[number] = StackDump(process, line.signals, line.stacks, self._found[number].condition)

    # ------------------------------------------------------------------------------------------------- collectives

    def _read(self, then: Callable[[], None], only: tuple[int, ...] | None = None) -> None:
        """Ask all ranks, or ``only`` some for details; go on with ``then`` when all have answered or are late."""
        self._round += 1
        self._asked.clear()
        for number, line in self._ranks.lines.items():
            if number in self._ranks.processes and (only is None or number in only):
                line.catch_up()
                if line.answers and self._found[number].condition is not Condition.STOPPED:
                    self._asked[number] = line
        for number, line in self._asked.items():
            line.listen(self._loop.guard(partial(self._heard, number)))
            line.ask(details=only is not None)
        patience = DETAILS_PATIENCE if only is not None else PATIENCE + PER_RANK * len(self._found)
        deadline = min(time.monotonic() + patience, self._until)
        self._go_on(deadline, then)

    def _go_on(self, deadline: float, then: Callable[[], None]) -> None:
        """Wait for answers and dumps."""
        for number in tuple(self._unsure):
            if number not in self._asked or time.monotonic() - self._began > SURE:
                self._begin_dump(number)
        waiting = [number for number in self._asked if number in self._ranks.processes]
        dumping = any([dump.look() for dump in self._dumps.values()])
        dumping |= any([workers.look() for workers in self._workers.values()])
        if (waiting or dumping) and time.monotonic() < deadline:
            self._loop.after(_POLL, lambda: self._go_on(deadline, then))
            return
        for number, line in self._asked.items():
            line.rest()
            found = self._found[number]
            if self._round == 1 and number in self._ranks.processes:
                self._found[number] = replace(found, answers=False)
        self._asked.clear()
        then()

    def _heard(self, number: int, said: RankAnswer) -> None:
        if self._asked.pop(number, None) is None:
            return
        self._ranks.lines[number].rest()
        if number in self._unsure:
            self._begin_dump(number)
        found = self._found[number]
        try:
            if self._detail is Detail.PACE:
                most = kept(self._ranks.plan.world_size)
                arrivals = [each for trace in said.traces for each in read_trace(number, trace, most)]
                found = replace(found, answers=said.initialised or None, arrivals=tuple(arrivals))
            elif self._round == 1:
                self._counts[number], self._outer[number] = said.groups, said.outer
                found = first_reading(found, said)
            elif self._round == 2:
                again = first_reading(found, said)
                moved = again.groups != found.groups or said.groups != self._counts.get(number)
                found = replace(found, groups=again.groups, moved=moved, inside=again.inside)
            else:
                found = detailed_reading(found, said)
        except (ValueError, TypeError):  # the program has written to our socket
            found = replace(found, answers=None)
        self._found[number] = found

    def _read_once(self) -> None:
        self._take_stacks()
        for number, found in self._found.items():
            process = self._ranks.processes.get(number)
            if process is not None and (words := waiting_for(found)) in WAITS_FOR_CHILDREN:
                of_loader = words == LOADER_WAIT
                self._workers[number] = LoaderWorkers(process, self._ranks.lines[number], of_loader=of_loader)
        deadline = min(time.monotonic() + loader_workers.PATIENCE, self._until)
        self._go_on(deadline, self._take_workers)

    def _take_workers(self) -> None:
        for number, workers in self._workers.items():
            workers.give_up()
            self._found[number] = replace(self._found[number], workers=tuple(workers.found))
        self._workers.clear()
        told = any(found.groups or found.inside for found in self._found.values())
        if self._detail is not Detail.WAITS or not told:
            return self._end()
        pause = max(0.0, min(self._began + AGAIN, self._until) - time.monotonic())
        self._loop.after(pause, lambda: self._read(self._read_twice))

    def _read_twice(self) -> None:
        """Ask the ranks that settle who waits for whom for their last collectives, and more ranks where they do not."""
        wanted = needs(self._inspection())
        if wanted and self._round < _MAX_ROUNDS:
            self._read(self._read_twice, only=wanted)
        else:
            self._end()

    def _take_stacks(self) -> None:
        for number, dump in self._dumps.items():
            dump.give_up()
            if dump.why_not == TAKEN:
                self._ranks.lines[number].signals = (0, 0)  # once is enough: what it prints of it looks like progress
            found = self._found[number]
            threads = parse_dump(dump.text, os.getcwd(), outer=self._outer.get(number, b"")) if dump.text else ()
            condition = _TOLD_BY_SIGNALS.get(dump.why_not, found.condition)
            self._found[number] = replace(found, condition=condition, threads=threads, no_stack=dump.why_not)
        self._dumps.clear()

    def _end(self) -> None:
        self._until = min(self._until, time.monotonic() + LAST_WORD)
        self._take_ends()

    def _take_ends(self) -> None:
        """Answer once it is known how those ranks ended that have ended by now."""
        awaited = False
        for number, found in self._found.items():
            word = self._kernels_word(number)
            if word.condition is Condition.EXITED:
                self._found[number] = replace(found, condition=Condition.EXITED, code=word.code, ended=word.ended)
                awaited |= number in self._ranks.processes
        if awaited and time.monotonic() < self._until:
            self._loop.after(_POLL, self._take_ends)
        else:
            self._answer(self._inspection())

    def _inspection(self) -> Inspection:
        plan = self._ranks.plan
        found = tuple(self._found[number] for number in sorted(self._found))
        return Inspection(time.time(), found, plan.world_size)


def first_reading(found: RankInspection, said: RankAnswer) -> RankInspection:
    """Return what is known of a rank with what it says of its groups; ValueError or TypeError where that is none."""
    known = parse_known(said.groups)
    found = replace(found, inside=parse_call(said.call))
    groups = tuple(state for trace in said.traces for state in named(parse_states(trace), known))
    if not groups and any(count > 0 for count in known.values()):  # an older torch, or a recorder without a buffer
        return replace(found, answers=None, groups=unrecorded(known))
    return replace(found, answers=True if said.initialised and said.traces else None, groups=groups)


def detailed_reading(found: RankInspection, said: RankAnswer) -> RankInspection:
    """Return what is known of a rank with its last collectives; ValueError or TypeError where it does not tell them."""
    groups = first_reading(found, said).groups
    last = tuple(each for trace in said.traces for each in parse_last(trace))
    used = {each.group for each in groups} | {each.group for each in last}
    return replace(found, last=last, known=tuple(each for each in parse_known(said.groups) if each.group in used))
