"""A process with a door: ranks that sleep, an attempt after each failure, stopped by whoever asks or by SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from ddplaunch.diagnosis.inspection import Condition, Detail, Inspection, RankInspection
from ddplaunch.job.door import Door
from ddplaunch.job.status import Status
from ddplaunch.job.watch import Watch
from ddplaunch.loop import Loop
from ddplaunch.output import events
from ddplaunch.plan.layout import Node, Rank
from ddplaunch.plan.plan import Plan
from ddplaunch.target.target import Kind, Target


def plan(run_id: str = "r", ranks: int = 2) -> Plan:
    return Plan(
        run_id=run_id,
        target=Target(Kind.PROGRAM, "sleep", ("600",)),
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=0,
        nodes=(Node(0, "here", ranks, "typed"),),
        ranks=tuple(Rank(number, number, 0, "here", "cpu", None) for number in range(ranks)),
        variables={},
        max_restarts=9,
        backend=None,
        init_method=None,
        facts=(),
        notes=(),
    )


class Host:
    """Plays the supervisor: what a door serves, and what emits the events of real processes."""

    def __init__(self, run_id: str) -> None:
        self.loop = Loop()
        self.plan = plan(run_id)
        self.watch = Watch(self.plan)
        self.attempt = -1
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.stopped: str | None = None
        self.output: dict[int, bytes] = {}
        self.listeners: list[Callable[[int, bytes], None]] = []
        began = time.process_time()
        self.door = Door(self.loop, run_id, self)
        seconds = time.process_time() - began
        print(self.door.path, seconds, int("msgspec" in sys.modules), sep="\t", flush=True)

    def status(self) -> Status:
        return self.watch.status()

    def inspect(self, detail: Detail, answer: Callable[[Inspection], None]) -> None:
        found = (RankInspection(rank, "here", each.pid, Condition.ALIVE) for rank, each in self.processes.items())
        self.loop.soon(lambda: answer(Inspection(time.time(), tuple(found), len(self.plan.ranks))))

    def stop(self, now: bool) -> None:
        self.stopped = "now" if now else "with grace"
        self.watch.observe(events.Signalled(signal.SIGTERM))
        for process in self.processes.values():
            process.kill()

    def ranks(self) -> list[int]:
        return sorted(self.output)

    def printed(self, rank: int) -> bytes:
        return self.output[rank]

    def listen(self, hear: Callable[[int, bytes], None]) -> None:
        self.listeners.append(hear)

    def forget(self, hear: Callable[[int, bytes], None]) -> None:
        if hear in self.listeners:
            self.listeners.remove(hear)

    def start(self) -> None:
        self.attempt += 1
        self.watch.observe(events.Planned(self.plan, self.attempt))
        for rank in self.plan.local_ranks:
            process = self.processes[rank.rank] = subprocess.Popen(self.plan.target.argv)
            self.watch.observe(events.Started(rank.rank, process.pid, self.attempt))
            fd = os.pidfd_open(process.pid)
            self.loop.watch(fd, partial(self.exited, rank.rank, fd))

    def exited(self, rank: int, fd: int) -> None:
        self.loop.forget(fd)
        os.close(fd)
        process = self.processes.pop(rank)
        self.watch.observe(events.Exited(rank, process.pid, process.wait(), self.attempt))
        for other in self.processes.values():
            other.terminate()
        if not self.processes:
            self.watch.observe(events.Swept((), ()))
            if not self.stopped:
                self.start()

    def run(self) -> None:
        self.loop.catch([signal.SIGTERM], lambda number: self.stop(False))
        self.start()
        while self.processes:
            self.loop.step()
        self.door.close()
        print(self.stopped, flush=True)


if __name__ == "__main__":
    Host(sys.argv[1]).run()
