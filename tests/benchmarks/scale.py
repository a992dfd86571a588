"""``python -m tests.benchmarks.scale``: measures what more nodes cost node 0, on one machine.

Real: N launchers with one trivial rank each. All but node 0 are started first and wait for it, so that the price of
starting N interpreters on one machine, which no job pays, is not in the figures. Simulated: node 0 is real, one process
simulates the others; this goes further, and leaves node 0 a processor of its own. It asserts nothing about seconds; the
exit code is 1 where something did not end as it should.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import resource
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from tests.benchmarks.harness import (
    Failed,
    Values,
    adopt_orphans,
    cpu_ms,
    descendants,
    environment,
    format_number,
    kill_descendants,
)
from tests.benchmarks.simulated_nodes import SimulatedNodes
from tests.conftest import free_port

TIMEOUT_S = 180.0
"""After which a job counts as hung."""

KILLED, INTERRUPTED = 128 + signal.SIGKILL, 128 + signal.SIGINT

RANK = 'echo "$RANK $$" >"$BENCH_REPORT"; exec sleep 1000'


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.scale", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--nodes", type=_numbers, default=[4, 16, 64], metavar="N,N", help="real launchers")
    parser.add_argument(
        "--played", type=_numbers, default=[64, 1000, 4000], metavar="N,N", help="nodes, one of them real"
    )
    parser.add_argument(
        "--rest", type=float, default=22.5, metavar="S", help="seconds at rest [default: 22.5, six heartbeats]"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that jobs are cleaned up
    signal.signal(signal.SIGINT, signal.default_int_handler)  # even where it is ignored: launchers inherit that
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}")
    complete = True
    for title, sizes, measure in (
        ("Real launchers", options.nodes, measure_real),
        ("Node 0 real, the others simulated", options.played, measure_simulated),
    ):
        measured: dict[int, Values] = {}
        for nodes in sizes:
            try:
                measured[nodes] = measure(nodes, options.rest)
            except Failed as failed:
                print(f"{title}, {nodes} nodes: FAILED: {failed}", file=sys.stderr, flush=True)
        complete &= len(measured) == len(sizes)
        print(f"\n{title}:\n\n{table(measured)}", flush=True)
    return int(not complete)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


class Launchers:
    """The launchers of one job, each with one rank that reports its start; a context manager, which ends them all.

    Attributes:
        ranks: the process of each rank that has reported its start, and when it did.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes, self.port = nodes, free_port()
        self.ranks: dict[int, tuple[int, float]] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._cleanup = ExitStack()
        self._folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="scale-")))
        os.mkfifo(self._folder / "report")
        self._report = os.open(self._folder / "report", os.O_RDWR)  # as a writer too, so that it never ends
        self._cleanup.callback(os.close, self._report)
        self._cleanup.callback(kill_descendants)
        adopt_orphans()

    def __enter__(self) -> Launchers:
        return self

    def __exit__(self, *error: object) -> None:
        self._cleanup.close()
        for process in self._processes.values():
            process.wait()  # some were collected as orphans

    @property
    def control_port(self) -> int:
        return self.port + 1

    @property
    def node_zero(self) -> int:
        """The pid of node 0's launcher."""
        return self._processes[0].pid

    def start(self, node_rank: int) -> None:
        where = ["--master-addr", "127.0.0.1", "--master-port", str(self.port)]
        which = ["--nnodes", str(self.nodes), "--node-rank", str(node_rank), "--nproc", "1"]
        folder = str(self._folder)
        with open(self._folder / f"{node_rank}.stderr", "wb") as stderr:
            self._processes[node_rank] = subprocess.Popen(
                [sys.executable, "-m", "ddplaunch", "run", *which, *where, "--no-python", "/bin/sh", "-c", RANK],
                env={**environment(), "HOME": folder, "TMPDIR": folder, "BENCH_REPORT": f"{folder}/report"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    def read_stderr(self, node_rank: int = 0) -> str:
        """What a launcher has written to stderr so far."""
        return (self._folder / f"{node_rank}.stderr").read_text(errors="replace")

    def until(self, condition: Callable[[], bool], what: str, pause: float = 0.005) -> float:
        """Wait for a condition; return when it was true.

        Raises:
            Failed: it did not come.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise Failed(f"{what}: not in {TIMEOUT_S:.0f} s; stderr of node 0: {self.read_stderr()[-300:]!r}")
            time.sleep(pause)
        return time.monotonic()

    def until_ranks_run(self, count: int) -> None:
        """Wait until ``count`` ranks have reported their start."""

        def reported() -> bool:
            if select.select([self._report], [], [], 0.02)[0]:
                now = time.monotonic()
                for line in os.read(self._report, 1 << 16).decode().splitlines():
                    rank, pid = map(int, line.split())
                    self.ranks[rank] = pid, now
            return len(self.ranks) >= count

        self.until(reported, "ranks run", pause=0)

    def join(self) -> float:
        """Start all, node 0 last; return the seconds from the moment when it listens until its rank runs."""
        others = range(1, self.nodes)
        for node_rank in others:
            self.start(node_rank)
        self.until(lambda: all(map(self.read_stderr, others)), "all wait for node 0", pause=0.1)
        self.start(0)
        listening = self.until(lambda: listens(self.control_port), "node 0 listens")
        self.until_ranks_run(self.nodes)
        return self.ranks[0][1] - listening

    def finish(self, expected: int) -> float:
        """Wait until every launcher has exited; return when the last did.

        Raises:
            Failed: one did not, or not with this code, or left a process behind.
        """
        deadline = time.monotonic() + TIMEOUT_S
        for rank, process in self._processes.items():
            fd = os.pidfd_open(process.pid)
            ended, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            os.close(fd)
            if not ended:
                raise Failed(f"node {rank} had not exited after {TIMEOUT_S:.0f} s")
        last = time.monotonic()
        codes = {process.wait() for process in self._processes.values()}
        if codes != {expected}:
            raise Failed(f"exit codes {sorted(codes)} instead of {expected}; node 0: {self.read_stderr()[-300:]!r}")
        if left := descendants():
            raise Failed(f"left behind: {', '.join(map(str, left))}")
        return last

    def at_rest(self, seconds: float, wait: Callable[[float], object]) -> Values:
        """What node 0 does while nothing happens."""
        wait(1.0)
        before, cpu, began = traffic(self.control_port), cpu_ms(self.node_zero), time.monotonic()
        wait(seconds)
        took = time.monotonic() - began
        return {
            "at rest: node 0's CPU, ms/s": (cpu_ms(self.node_zero) - cpu) / took,
            "at rest: bytes/s, both ways": (sum(traffic(self.control_port)) - sum(before)) / took,
        }


def listens(port: int) -> bool:
    """Whether a process listens on a TCP port of this machine."""
    tables = [path.read_text() for path in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if path.exists()]
    return any(re.search(rf":{port:04X} 0+:0000 0A ", each) for each in tables)


def traffic(port: int) -> tuple[int, int]:
    """Bytes sent and received on all open connections that ``port`` of this machine has accepted; asks ss."""
    command = ["ss", "-tinH", "state", "established", "sport", "=", f":{port}"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    sent, received = (
        sum(map(int, re.findall(rf"\b{name}:(\d+)", output))) for name in ("bytes_sent", "bytes_received")
    )
    return sent, received


def measure_real(nodes: int, rest: float) -> Values:
    """Two jobs: one whose last rank is killed, one that is interrupted on node 0.

    Raises:
        Failed: one did not run, or did not end as it should.
    """
    with Launchers(nodes) as job:
        values = {"s until all have joined": job.join(), **job.at_rest(rest, time.sleep)}
        began = time.monotonic()
        os.kill(job.ranks[nodes - 1][0], signal.SIGKILL)
        values["s from kill -9 of a rank to the last exit"] = job.finish(KILLED) - began
    with Launchers(nodes) as job:
        job.join()
        began = time.monotonic()
        os.kill(job.node_zero, signal.SIGINT)
        values["s from Ctrl-C on node 0 to the last exit"] = job.finish(INTERRUPTED) - began
    return values


def measure_simulated(nodes: int, rest: float) -> Values:
    """A job in which all others call node 0 at once, and the last one's rank fails.

    Raises:
        Failed: not all joined, or not all received the end.
    """
    with Launchers(nodes) as job, closing(SimulatedNodes(nodes)) as others:

        def run_until_received(message: str) -> float:
            if not others.run_until(lambda: others.received[message] >= nodes - 1, TIMEOUT_S):
                raise Failed(f"{message}: not in {TIMEOUT_S:.0f} s, received: {dict(others.received)}")
            return time.monotonic()

        job.start(0)
        job.until(lambda: bool(job.read_stderr()), "node 0 waits")
        time.sleep(0.5)  # the process that will start its rank begins too
        cpu, began = cpu_ms(job.node_zero), time.monotonic()
        others.call(job.control_port)
        values = {"s to all joined": run_until_received("JoinAccepted") - began}
        run_until_received("StartAttempt")
        job.until_ranks_run(1)
        status = Path(f"/proc/{job.node_zero}/status").read_text()
        values |= {
            "node 0's CPU for joining, ms": cpu_ms(job.node_zero) - cpu,
            "MB sent by node 0 until then": traffic(job.control_port)[0] / 1e6,
            "node 0's peak memory, MB": int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) * 1024 / 1e6,
            "connections that node 0 dropped": float(others.received["dropped"]),
            **job.at_rest(rest, lambda seconds: others.run_until(lambda: False, seconds)),
        }
        began = time.monotonic()
        others.nodes[-1].fail()
        values["s from a rank's death to the end sent to all"] = run_until_received("EndJob") - began
        others.close()
        job.finish(KILLED)
    return values


def table(measured: dict[int, Values]) -> str:
    """Markdown: a row a value, a column a size, and the power of the number of nodes that fits."""
    sizes = sorted(measured)
    lines = [
        f"| nodes | {' | '.join(f'{nodes:,}' for nodes in sizes)} | grows as |",
        "|---" * (len(sizes) + 2) + "|",
    ]
    for name in dict.fromkeys(name for values in measured.values() for name in values):
        points = [(nodes, measured[nodes][name]) for nodes in sizes]
        power = exponent(points)
        grows = "–" if power is None else f"N^{power:.1f}"
        lines.append(f"| {name} | {' | '.join(format_number(value) for _, value in points)} | {grows} |")
    return "\n".join(lines)


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """The power of x with which y grows, by least squares; None where there are too few points, or zeros."""
    if len(points) < 2 or any(y <= 0 for _, y in points):
        return None
    slope, _ = statistics.linear_regression(*zip(*((math.log(x), math.log(y)) for x, y in points), strict=True))
    return slope


if __name__ == "__main__":
    sys.exit(main())
