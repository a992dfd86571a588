"""One attempt on this node: which ranks live, which were told to end, which failed."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

from ddplaunch.agent import limits, post_mortem
from ddplaunch.agent.rank_process import RankProcess
from ddplaunch.agent.temporary import Temporary
from ddplaunch.control.failure import MAX_TOLD, Failure, within
from ddplaunch.control.messages import Broken, Drained
from ddplaunch.errors import EXIT_OS
from ddplaunch.output.streams import Streams
from ddplaunch.plan.layout import Rank
from ddplaunch.plan.plan import Plan

INTERRUPT_PATIENCE = 3.0
"""Seconds after which ranks that Ctrl-C did not end are told by SIGTERM: a wait inside torch never sees SIGINT."""


class Attempt:
    """The processes of an attempt and what became of them.

    Attributes:
        number: 0 is the first, -1 none yet.
        processes: by rank, those that live. pending: how many are wanted and not there yet, started: were ever there.
        failures: those that nobody asked for. stopped: how many ended because they were told to.
        told: the signals that all ranks got.
        finished: whether all ranks have done their work; released: whether those of the other nodes have, too.
        broken: what happened to the zygote, if anything did.
    """

    def __init__(self, number: int, temporary: Temporary) -> None:
        """``temporary`` is the folder of the error files."""
        self.number = number
        self.processes: dict[int, RankProcess] = {}
        self.pending = 0
        self.started = 0
        self.failures: list[Failure] = []
        self.stopped = 0
        self.told: set[int] = set()
        self.finished = False
        self.released = False
        self.broken: Broken | None = None
        self._temporary = temporary
        self._memory = post_mortem.Memory()

    def error_file(self, rank: int) -> str | None:
        """Where an exception of this rank is recorded."""
        folder = self._temporary.path
        return os.path.join(folder, f"{rank}.{self.number}.json") if folder else None

    @property
    def idle(self) -> bool:
        """Whether every rank has ended, or only holds the store."""
        return not self.pending and all(process.finished for process in self.processes.values())

    def spawned(self, rank: Rank, pid: int, pidfd: int | None) -> RankProcess:
        """A rank has its process."""
        self.pending -= 1
        self.started += 1
        process = self.processes[rank.rank] = RankProcess(rank, pid, pidfd)
        return process

    def ended(self, rank: int, pid: int) -> RankProcess | None:
        """Forget the process of a rank; None where that is one of an attempt before, which could not be killed."""
        if rank not in self.processes or self.processes[rank].pid != pid:
            return None
        process = self.processes.pop(rank)
        if process.pidfd is not None:
            os.close(process.pidfd)
        return process

    def judge(self, process: RankProcess, code: int) -> Failure | None:
        """Tell a failure from the end that we asked for; ``code`` is -N for signal N."""
        recorded = post_mortem.read_error_file(self.error_file(process.rank.rank))
        if process.signalled:
            if recorded.message is None:
                self.stopped += 1
                return None
            code = 1  # its exception came first, our signal only cut its end short
        new = post_mortem.failure(process.rank, process.pid, self.number, code, recorded, self._memory)
        self.failures.append(new)
        return new

    def unborn(self, plan: Plan, number: int, reason: int) -> Failure | None:
        """A rank got no process, or no descriptors, for the reason of this errno; None after the first such rank."""
        self.pending -= 1
        if any(not failure.pid for failure in self.failures):
            return None
        many = len(plan.local_ranks)
        before = f"; {self.started} of {many} ranks had been started here" if many > 1 else ""
        message = f"rank {number} could not be started: {limits.why_unborn(reason)}{before}"
        rank = plan.ranks[number]
        new = post_mortem.failure(rank, 0, self.number, EXIT_OS, post_mortem.Recorded(message), self._memory)
        self.failures.append(new)
        return new

    def stop_all(self, number: int) -> None:
        """Tell the leaders, never their groups: a DataLoader's workers must live while a checkpoint is written."""
        for process in self.processes.values():
            process.stop(number)

    def send_all(self, number: int) -> None:
        """Send a signal that is not meant to end anything."""
        for process in self.processes.values():
            process.send(number)

    def cut_short(self) -> None:
        """Whatever ends from now on was told to."""
        for process in self.processes.values():
            process.signalled = True

    def cut_off(self, how: str | None) -> None:
        """The ranks ended with their zygote; those that had recorded an exception before have failed by themselves.

        ``how`` the zygote ended, None where we have ended it.
        """
        self.broken = Broken(how, time.time()) if how else None
        self.cut_short()
        for process in self.processes.values():
            self.judge(process, -signal.SIGKILL)
        self.processes.clear()
        self.pending = 0

    def account(self, streams: Streams, *, heeded: bool) -> Drained:
        """What is to be told of it in the end, failures with the last lines that each rank printed."""
        failures = (replace(each, tail=post_mortem.last_lines(streams.tail(each.rank))) for each in self.failures)
        return Drained(self.number, tuple(within(failures, MAX_TOLD)), self.stopped, time.time(), self.broken, heeded)
