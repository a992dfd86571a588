"""``python -m tests.benchmarks.scale``: measures what more nodes cost node 0, on one machine.

Real: N launchers with one trivial rank each. All but node 0 are started first and wait for it, so that the price of
starting N interpreters on one machine, which no job pays, is not in the figures. Simulated: node 0 is real, one process
simulates the others; this goes further, and leaves node 0 a processor of its own. It asserts nothing about seconds; the
exit code is 1 where something did not end as it should.
"""

import argparse
import math
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from tests.benchmarks import kernel
from tests.benchmarks.launchers import DEADLINE, Launchers
from tests.benchmarks.measure import Failed
from tests.benchmarks.players import Players
from tests.benchmarks.runner import Values, number

KILLED, INTERRUPTED = 128 + signal.SIGKILL, 128 + signal.SIGINT


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.scale", description=(__doc__ or "").partition(": ")[2].splitlines()[0]
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


def measure_real(nodes: int, rest: float) -> Values:
    """Two jobs: one whose last rank is killed, one that is interrupted on node 0.

    Raises:
        Failed: one did not run, or did not end as it should.
    """
    with Launchers(nodes) as job:
        values = {"s until all have joined": _join(job), **_at_rest(job, rest, time.sleep)}
        began = time.monotonic()
        job.kill_rank(nodes - 1)
        values["s from kill -9 of a rank to the last exit"] = _ended(job, KILLED) - began
    with Launchers(nodes) as job:
        _join(job)
        began = time.monotonic()
        job.interrupt()
        values["s from Ctrl-C on node 0 to the last exit"] = _ended(job, INTERRUPTED) - began
    return values


def _join(job: Launchers) -> float:
    """Seconds from the moment when node 0 listens until all have joined."""
    for node_rank in range(1, job.nodes):
        job.start(node_rank)
    job.until(job.all_seek, "all wait for node 0", pause=0.1)
    job.start(0)
    listening = job.until(lambda: kernel.listens(job.control_port), "node 0 listens")
    job.until(lambda: job.all_run(job.nodes), "all ranks run", pause=0)
    return job.ranks[0][1] - listening


def _ended(job: Launchers, expected: int) -> float:
    last, codes = job.finish()
    if codes != {expected}:
        raise Failed(f"exit codes {sorted(codes)} instead of {expected}; node 0 says {job.read_stderr(0)[-300:]!r}")
    return last


def _at_rest(job: Launchers, seconds: float, wait: Callable[[float], object]) -> Values:
    """What node 0 does while nothing happens."""
    wait(1.0)
    before, cpu, began = kernel.traffic(job.control_port), kernel.processor_ms(job.pid(0)), time.monotonic()
    wait(seconds)
    took = time.monotonic() - began
    return {
        "at rest: node 0's CPU, ms/s": (kernel.processor_ms(job.pid(0)) - cpu) / took,
        "at rest: bytes/s, both ways": (sum(kernel.traffic(job.control_port)) - sum(before)) / took,
    }


def measure_simulated(nodes: int, rest: float) -> Values:
    """A job in which all others call node 0 at once, and the last one's rank fails.

    Raises:
        Failed: not all joined, or not all received the end.
    """
    with Launchers(nodes) as job, closing(Players(nodes)) as players:

        def play_until(what: str, message: str) -> float:
            if not players.until(lambda: players.received[message] >= nodes - 1, DEADLINE):
                raise Failed(f"{what}: not in {DEADLINE:.0f} s, received: {dict(players.received)}")
            return time.monotonic()

        job.start(0)
        job.until(lambda: bool(job.read_stderr(0)), "node 0 waits")
        time.sleep(0.5)  # the process that will start its rank begins too
        cpu, began = kernel.processor_ms(job.pid(0)), time.monotonic()
        players.call(job.control_port)
        values = {"s to all joined": play_until("all have joined", "JoinAccepted") - began}
        play_until("all were started", "StartAttempt")
        job.until(lambda: job.all_run(1), "node 0's rank runs", pause=0)
        values |= {
            "node 0's CPU for joining, ms": kernel.processor_ms(job.pid(0)) - cpu,
            "MB sent by node 0 until then": kernel.traffic(job.control_port)[0] / 1e6,
            "node 0's peak memory, MB": kernel.peak_memory(job.pid(0)),
            "connections that node 0 dropped": float(players.received["dropped"]),
            **_at_rest(job, rest, lambda s: players.until(lambda: False, s)),
        }
        began = time.monotonic()
        players.all[-1].fail()
        values["s from a rank's death to the end sent to all"] = play_until("the end was sent", "EndJob") - began
        players.close()
        _ended(job, KILLED)
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
        lines.append(f"| {name} | {' | '.join(number(value) for _, value in points)} | {grows} |")
    return "\n".join(lines)


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """The power of x with which y grows, by least squares; None where there are too few points, or zeros."""
    if len(points) < 2 or any(y <= 0 for _, y in points):
        return None
    logs = [(math.log(x), math.log(y)) for x, y in points]
    x_mean, y_mean = (sum(each) / len(logs) for each in zip(*logs, strict=True))
    spread = sum((x - x_mean) ** 2 for x, _ in logs)
    return sum((x - x_mean) * (y - y_mean) for x, y in logs) / spread if spread else None


if __name__ == "__main__":
    sys.exit(main())
