"""``python -m tests.tools.benchmarks.scale``: how node 0's costs grow with the number of nodes, on one machine.

Real: N launchers with one trivial rank each. All but node 0 are started first and wait for it, so that the start of N
interpreters on one machine, which no job needs, is not measured. Simulated: node 0 is real, one process simulates the
others; this allows more nodes, and leaves node 0 a processor of its own. It asserts nothing about seconds; the exit
code is 1 if a job did not end as it should.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import psutil

from tests.conftest import free_port
from tests.tools.benchmarks.harness import BenchmarkError, Job, Values, format_number, read_cpu_ms
from tests.tools.benchmarks.simulated_nodes import SimulatedNodes

TIMEOUT_S = 180.0
"""After which a job counts as hung."""

SETTLING_S = 1.0
"""Wait before the measurement of a job at rest."""

RANK = 'echo "running $RANK 0 $$" >"$BENCH_REPORT"; exec sleep 1000'
"""A rank that marks its start, as programs/marks.py does."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.benchmarks.scale", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--nodes", type=_parse_numbers, default=[4, 16, 64], metavar="N,N", help="real launchers")
    parser.add_argument(
        "--played", type=_parse_numbers, default=[64, 1000, 4000], metavar="N,N", help="nodes, one of them real"
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
            except BenchmarkError as failed:
                print(f"{title}, {nodes} nodes: FAILED: {failed}", file=sys.stderr, flush=True)
        complete &= len(measured) == len(sizes)
        print(f"\n{title}:\n\n{render_table(measured)}", flush=True)
    return int(not complete)


def _parse_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def make_command(nodes: int, node_rank: int, port: int) -> list[str]:
    """The command of a node's launcher, with one rank that marks its start."""
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    which = ["--nnodes", str(nodes), "--node-rank", str(node_rank), "--nproc", "1"]
    return [sys.executable, "-m", "ddplaunch", "run", *which, *where, "--no-python", "/bin/sh", "-c", RANK]


def join_node_zero(job: Job, nodes: int, port: int) -> float:
    """Start node 0, as the last launcher, when all others wait for it.

    Return the seconds from the moment when it listens until its rank runs.
    """
    job.wait_until(lambda: all(map(job.stderr, range(nodes - 1))), TIMEOUT_S, poll_s=0.1)
    job.start(make_command(nodes, 0, port))
    node_zero = psutil.Process(job.launchers[-1].pid)
    listening = job.wait_until(
        lambda: any(each.status == psutil.CONN_LISTEN for each in node_zero.net_connections("tcp"))
    )
    job.wait_for_ranks("running", nodes)
    return next(mark.time for mark in job.marks if mark.rank == 0) - listening


def measure_at_rest(node_zero: int, seconds: float, wait: Callable[[float], object]) -> Values:
    """Measure node 0 while nothing happens."""
    wait(SETTLING_S)
    cpu, began = read_cpu_ms(node_zero), time.monotonic()
    wait(seconds)
    return {"at rest: node 0's CPU, ms/s": (read_cpu_ms(node_zero) - cpu) / (time.monotonic() - began)}


def wait_for_exit(job: Job, number: int) -> float:
    """Wait until all launchers have exited as by a signal; return when the last did. BenchmarkError if one did not."""
    if (code := job.finish()) != 128 + number:
        raise BenchmarkError(
            f"exit code {code} instead of {128 + number}; node 0: {job.stderr(len(job.launchers) - 1)[-300:]!r}"
        )
    assert job.exited_at is not None
    return job.exited_at


def measure_real(nodes: int, rest: float) -> Values:
    """Measure two jobs: one whose last rank is killed, one that is interrupted on node 0.

    Raises:
        BenchmarkError: one did not run, or did not end as it should.
    """
    values: Values = {}
    for number in (signal.SIGKILL, signal.SIGINT):
        port = free_port()
        with Job(*(make_command(nodes, node_rank, port) for node_rank in range(1, nodes))) as job:
            joined, node_zero = join_node_zero(job, nodes, port), job.launchers[-1].pid
            if number == signal.SIGKILL:
                values |= {"s until all have joined": joined, **measure_at_rest(node_zero, rest, time.sleep)}
                what, target_pid = "s from kill -9 of a rank to the last exit", job.pids("running")[nodes - 1]
            else:
                what, target_pid = "s from Ctrl-C on node 0 to the last exit", node_zero
            began = time.monotonic()
            os.kill(target_pid, number)
            values[what] = wait_for_exit(job, number) - began
    return values


def measure_simulated(nodes: int, rest: float) -> Values:
    """Measure a job in which all others connect to node 0 at once, and the last one's rank fails.

    Raises:
        BenchmarkError: not all joined, or not all received the end.
    """
    port = free_port()
    with Job(make_command(nodes, 0, port)) as job, closing(SimulatedNodes(nodes)) as others:
        node_zero = job.launchers[0].pid

        def run_until_received(message: str) -> float:
            if not others.run_until(lambda: others.received[message] >= nodes - 1, TIMEOUT_S):
                raise BenchmarkError(f"{message}: not in {TIMEOUT_S:.0f} s, received: {dict(others.received)}")
            return time.monotonic()

        job.wait_until(lambda: bool(job.stderr()))
        time.sleep(0.5)  # until the process that will start its rank has begun
        cpu, began = read_cpu_ms(node_zero), time.monotonic()
        others.connect(port + 1)
        values = {"s to all joined": run_until_received("JoinAccepted") - began}
        run_until_received("StartAttempt")
        job.wait_for_ranks("running", 1)
        peak = re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{node_zero}/status").read_text())
        values |= {
            "node 0's CPU for joining, ms": read_cpu_ms(node_zero) - cpu,
            "MB sent by node 0 until then": others.received["bytes"] / 1e6,
            "node 0's peak memory, MB": int(peak[0]) * 1024 / 1e6,
            "connections that node 0 dropped": float(others.received["dropped"]),
        }
        sent = others.received["bytes"]
        values |= measure_at_rest(node_zero, rest, lambda seconds: others.run_until(lambda: False, seconds))
        values["at rest: bytes/s sent by node 0"] = (others.received["bytes"] - sent) / (SETTLING_S + rest)
        began = time.monotonic()
        others.nodes[-1].fail()
        values["s from a rank's death to the end sent to all"] = run_until_received("EndJob") - began
        others.close()
        wait_for_exit(job, signal.SIGKILL)
    return values


def render_table(measured: dict[int, Values]) -> str:
    """Render in Markdown: a row for each value, a column for each size, and the fitted power of the number of nodes."""
    sizes = sorted(measured)
    lines = [
        f"| nodes | {' | '.join(f'{nodes:,}' for nodes in sizes)} | grows as |",
        "|---" * (len(sizes) + 2) + "|",
    ]
    for name in dict.fromkeys(name for values in measured.values() for name in values):
        points = [(nodes, measured[nodes][name]) for nodes in sizes]
        power = fit_exponent(points)
        grows = "–" if power is None else f"N^{power:.1f}"
        lines.append(f"| {name} | {' | '.join(format_number(value) for _, value in points)} | {grows} |")
    return "\n".join(lines)


def fit_exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Fit the power of x with which y grows, by least squares; None if there are too few points, or zeros."""
    if len(points) < 2 or any(y <= 0 for _, y in points):
        return None
    slope, _ = statistics.linear_regression(*zip(*((math.log(x), math.log(y)) for x, y in points), strict=True))
    return slope


if __name__ == "__main__":
    sys.exit(main())
