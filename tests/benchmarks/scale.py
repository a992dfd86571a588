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
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import psutil

from tests.benchmarks.harness import Failed, Job, Values, cpu_ms, format_number
from tests.benchmarks.simulated_nodes import SimulatedNodes
from tests.conftest import free_port

TIMEOUT_S = 180.0
"""After which a job counts as hung."""

SETTLING_S = 1.0
"""What is not measured before a job is at rest."""

RANK = 'echo "running $RANK 0 $$" >"$BENCH_REPORT"; exec sleep 1000'
"""A rank that marks its start, as programs/marks.py does."""


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


def command(nodes: int, node_rank: int, port: int) -> list[str]:
    """The launcher of a node, with one rank that marks its start."""
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    which = ["--nnodes", str(nodes), "--node-rank", str(node_rank), "--nproc", "1"]
    return [sys.executable, "-m", "ddplaunch", "run", *which, *where, "--no-python", "/bin/sh", "-c", RANK]


def join(job: Job, nodes: int, port: int) -> float:
    """Start node 0 when all others wait for it; return the seconds from the moment when it listens until its rank runs.

    Node 0 is the last of the job's launchers then.
    """
    job.wait(lambda: all(map(job.stderr, range(nodes - 1))), TIMEOUT_S, poll_s=0.1)
    job.start(command(nodes, 0, port))
    node_zero = psutil.Process(job.launchers[-1].pid)
    listening = job.wait(lambda: any(each.status == psutil.CONN_LISTEN for each in node_zero.net_connections("tcp")))
    job.until("running", nodes)
    return next(mark.time for mark in job.marks if mark.rank == 0) - listening


def at_rest(node_zero: int, seconds: float, wait: Callable[[float], object]) -> Values:
    """What node 0 does while nothing happens."""
    wait(SETTLING_S)
    cpu, began = cpu_ms(node_zero), time.monotonic()
    wait(seconds)
    return {"at rest: node 0's CPU, ms/s": (cpu_ms(node_zero) - cpu) / (time.monotonic() - began)}


def end(job: Job, number: int) -> float:
    """Wait until every launcher has exited, as if by a signal; return when the last did; Failed if one did not."""
    if (code := job.finish()) != 128 + number:
        raise Failed(
            f"exit code {code} instead of {128 + number}; node 0: {job.stderr(len(job.launchers) - 1)[-300:]!r}"
        )
    assert job.ended is not None
    return job.ended


def measure_real(nodes: int, rest: float) -> Values:
    """Two jobs: one whose last rank is killed, one that is interrupted on node 0.

    Raises:
        Failed: one did not run, or did not end as it should.
    """
    values: Values = {}
    for number in (signal.SIGKILL, signal.SIGINT):
        port = free_port()
        with Job(*(command(nodes, node_rank, port) for node_rank in range(1, nodes))) as job:
            joined, node_zero = join(job, nodes, port), job.launchers[-1].pid
            if number == signal.SIGKILL:
                values |= {"s until all have joined": joined, **at_rest(node_zero, rest, time.sleep)}
                what, victim = "s from kill -9 of a rank to the last exit", job.pids("running")[nodes - 1]
            else:
                what, victim = "s from Ctrl-C on node 0 to the last exit", node_zero
            began = time.monotonic()
            os.kill(victim, number)
            values[what] = end(job, number) - began
    return values


def measure_simulated(nodes: int, rest: float) -> Values:
    """A job in which all others call node 0 at once, and the last one's rank fails.

    Raises:
        Failed: not all joined, or not all received the end.
    """
    port = free_port()
    with Job(command(nodes, 0, port)) as job, closing(SimulatedNodes(nodes)) as others:
        node_zero = job.launchers[0].pid

        def run_until_received(message: str) -> float:
            if not others.run_until(lambda: others.received[message] >= nodes - 1, TIMEOUT_S):
                raise Failed(f"{message}: not in {TIMEOUT_S:.0f} s, received: {dict(others.received)}")
            return time.monotonic()

        job.wait(lambda: bool(job.stderr()))
        time.sleep(0.5)  # the process that will start its rank begins too
        cpu, began = cpu_ms(node_zero), time.monotonic()
        others.call(port + 1)
        values = {"s to all joined": run_until_received("JoinAccepted") - began}
        run_until_received("StartAttempt")
        job.until("running", 1)
        peak = re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{node_zero}/status").read_text())
        values |= {
            "node 0's CPU for joining, ms": cpu_ms(node_zero) - cpu,
            "MB sent by node 0 until then": others.received["bytes"] / 1e6,
            "node 0's peak memory, MB": int(peak[0]) * 1024 / 1e6,
            "connections that node 0 dropped": float(others.received["dropped"]),
        }
        sent = others.received["bytes"]
        values |= at_rest(node_zero, rest, lambda seconds: others.run_until(lambda: False, seconds))
        values["at rest: bytes/s sent by node 0"] = (others.received["bytes"] - sent) / (SETTLING_S + rest)
        began = time.monotonic()
        others.nodes[-1].fail()
        values["s from a rank's death to the end sent to all"] = run_until_received("EndJob") - began
        others.close()
        end(job, signal.SIGKILL)
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
