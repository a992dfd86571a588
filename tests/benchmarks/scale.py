"""``python -m tests.benchmarks.scale``: measures what more nodes cost, above all node 0, on one machine.

Real: N supervisors with one trivial rank each. All but node 0 are started first and wait for it, so that the price of
starting N interpreters on one machine, which no job pays, is not in the figures. Played: node 0 is real, one process
plays the others; this goes further, and leaves node 0 a processor of its own. It asserts nothing about seconds; the
exit code is 1 where something did not end as it should.
"""

import argparse
import json
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from tests.benchmarks import kernel, loglog
from tests.benchmarks.measure import Failed
from tests.benchmarks.players import Players
from tests.benchmarks.report import number
from tests.benchmarks.supervisors import DEADLINE, Supervisors

Values = dict[str, float]

KILLED, INTERRUPTED = 128 + signal.SIGKILL, 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.scale", description=(__doc__ or "").partition(": ")[2].splitlines()[0]
    )
    parser.add_argument("--nodes", type=_numbers, default=[4, 16, 64, 256], metavar="N,N", help="real supervisors")
    parser.add_argument(
        "--played", type=_numbers, default=[256, 1000, 2000], metavar="N,N", help="nodes, one of them real"
    )
    parser.add_argument(
        "--rest", type=float, default=22.5, metavar="S", help="seconds at rest [default: 22.5, six heartbeats]"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single number there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there, as SVG")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that jobs are cleaned up
    signal.signal(signal.SIGINT, signal.default_int_handler)  # even where it is ignored: supervisors inherit that
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}")
    real, bad = _all("real", options.nodes, lambda nodes: measure(nodes, options.rest))
    played, worse = _all("played", options.played, lambda nodes: play(nodes, options.rest))
    for title, measured in (("Real supervisors", real), ("Node 0 real, the others played", played)):
        print(f"\n{title}:\n\n{table(measured)}")
    if options.json:
        options.json.write_text(json.dumps({"real": real, "played": played}, indent=1))
    if options.plot:
        options.plot.write_text(loglog.draw(_curves(real, played), "nodes"))
    return int(bad or worse)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _all(title: str, sizes: list[int], experiment: Callable[[int], Values]) -> tuple[dict[int, Values], bool]:
    """Measure each size; return what was measured, and whether anything failed."""
    measured: dict[int, Values] = {}
    for nodes in sizes:
        load = os.getloadavg()[0]
        try:
            measured[nodes] = {**experiment(nodes), "load before": load}
            found = ", ".join(f"{key} {value:.4g}" for key, value in measured[nodes].items())
        except Failed as failed:
            found = f"FAILED: {failed}"
        print(f"{nodes} nodes, {title}: {found}", file=sys.stderr, flush=True)
    return measured, len(measured) < len(sizes)


# --------------------------------------------------------------------------------------------------- real supervisors


def measure(nodes: int, rest: float) -> Values:
    """Three jobs: one whose last rank is killed, one that is interrupted on node 0, one that ends well.

    Raises:
        Failed: one did not run, or did not end as it should.
    """
    with Supervisors(nodes) as job:
        values = _join(job)
        values |= _at_rest(job.pid(0), job.control_port, rest, time.sleep)
        began = time.monotonic()
        job.kill_rank(nodes - 1)
        values["s from a rank's death to the last exit"] = _ended(job, began, KILLED)
    with Supervisors(nodes) as job:
        _join(job)
        began = time.monotonic()
        job.interrupt()
        values["s from Ctrl-C to the last exit"] = _ended(job, began, INTERRUPTED)
    with Supervisors(nodes) as job:
        _join(job)
        began = time.monotonic()
        job.release()
        values["s from the end of all ranks to the last exit"] = _ended(job, began, 0)
    return values


def _join(job: Supervisors) -> Values:
    first = time.monotonic()
    for node_rank in range(1, job.nodes):
        job.start(node_rank)
    seeking = job.until(job.all_seek, "all wait for node 0", pause=0.1)
    began = time.monotonic()
    job.start(0)
    listening = job.until(lambda: kernel.listens(job.control_port), "node 0 listens")
    before = kernel.processor_ms(job.pid(0))
    job.until(lambda: job.all_run(job.nodes), "all ranks run", pause=0)
    last = max(when for _, when in job.ranks.values())
    sent = kernel.traffic(job.control_port)
    return {
        "s to start all others": seeking - first,
        "s from node 0's start to its listening": listening - began,
        "s from there to all joined": job.ranks[0][1] - listening,
        "s from there to all ranks running": last - listening,
        "node 0's CPU ms for joining": kernel.processor_ms(job.pid(0)) - before,
        "node 0's KB sent by then": sent.bytes_out / 1e3,
        "node 0's KB received by then": sent.bytes_in / 1e3,
        **_memory(job.pid(0)),
    }


def _ended(job: Supervisors, began: float, expected: int) -> float:
    last, codes = job.finish()
    if codes != {expected}:
        raise Failed(f"exit codes {sorted(codes)} instead of {expected}; node 0 says {job.read_stderr(0)[-300:]!r}")
    return last - began


def _memory(pid: int) -> Values:
    return {
        "node 0's RSS MB": kernel.resident_memory(pid),
        "node 0's peak MB": kernel.peak_memory(pid),
        "node 0's descriptors": kernel.descriptors(pid),
    }


def _at_rest(pid: int, port: int, seconds: float, wait: Callable[[float], object]) -> Values:
    """What node 0 does while nothing happens. A message at rest is a segment: it is small, and Nagle is off."""
    wait(1.0)
    before, cpu, began = kernel.traffic(port), kernel.processor_ms(pid), time.monotonic()
    wait(seconds)
    after, used, took = kernel.traffic(port), kernel.processor_ms(pid) - cpu, time.monotonic() - began
    return {
        "at rest: messages/s from node 0": (after.segments_out - before.segments_out) / took,
        "at rest: messages/s to node 0": (after.segments_in - before.segments_in) / took,
        "at rest: bytes/s, both ways": (after.bytes_out - before.bytes_out + after.bytes_in - before.bytes_in) / took,
        "at rest: node 0's CPU ms/s": used / took,
    }


# ----------------------------------------------------------------------------------------------------- played nodes


def play(nodes: int, rest: float) -> Values:
    """Two jobs, in which all others call node 0 at once: one where the last one's rank fails, one that ends well.

    Raises:
        Failed: not all were taken in, or were told the end.
    """
    with Supervisors(nodes) as job, closing(Players(nodes)) as players:
        values = _gather(job, players)
        values |= _at_rest(job.pid(0), job.control_port, rest, lambda s: players.until(lambda: False, s))
        began = time.monotonic()
        players.all[-1].fail()
        values["s from a rank's death to the end told to all"] = _play_to_end(job, players, KILLED) - began
    with Supervisors(nodes) as job, closing(Players(nodes)) as players:
        _gather(job, players)
        began = time.monotonic()
        for player in players.all:
            player.finish()
        job.release()
        values["s from the end of all ranks to the end told to all"] = _play_to_end(job, players, 0) - began
    return values


def _gather(job: Supervisors, players: Players) -> Values:
    job.start(0)
    job.until(lambda: bool(job.read_stderr(0)), "node 0 waits")
    time.sleep(0.5)  # the process that will start its rank begins too
    others, before, began = job.nodes - 1, kernel.processor_ms(job.pid(0)), time.monotonic()
    players.call(job.control_port)
    _play_until(players, lambda: players.received["JoinAccepted"] >= others, "all were taken in")
    joined = time.monotonic()
    _play_until(players, lambda: players.received["StartAttempt"] >= others, "all were told to start")
    started_at = time.monotonic()
    job.until(lambda: job.all_run(1), "node 0's rank runs", pause=0)
    return {
        "s to all joined": joined - began,
        "s to all told to start": started_at - began,
        "node 0's CPU ms for joining": kernel.processor_ms(job.pid(0)) - before,
        "node 0's KB sent by then": kernel.traffic(job.control_port).bytes_out / 1e3,
        "connections that node 0 dropped": float(players.received["dropped"]),
        **_memory(job.pid(0)),
    }


def _play_to_end(job: Supervisors, players: Players, expected: int) -> float:
    """Play to the end of the job; return when all knew."""
    _play_until(players, lambda: players.received["EndJob"] >= job.nodes - 1, "all were told the end")
    ended_at = time.monotonic()
    players.close()
    _ended(job, ended_at, expected)
    return ended_at


def _play_until(players: Players, done: Callable[[], bool], what: str) -> None:
    if not players.until(done, DEADLINE):
        raise Failed(f"{what}: not in {DEADLINE:.0f} s, heard of node 0: {dict(players.received)}")


# ------------------------------------------------------------------------------------------------------------ report


def table(measured: dict[int, Values]) -> str:
    """Markdown: a row a value, a column a size, and the power of the number of nodes that fits."""
    sizes = sorted(measured)
    lines = [
        f"| nodes | {' | '.join(f'{nodes:,}' for nodes in sizes)} | grows as |",
        "|---" * (len(sizes) + 2) + "|",
    ]
    for name in dict.fromkeys(name for values in measured.values() for name in values):
        points = [(nodes, measured[nodes][name]) for nodes in sizes]
        power = loglog.exponent(points)
        grows = "–" if power is None or name == "load before" else f"N^{power:.1f}"
        lines.append(f"| {name} | {' | '.join(number(value) for _, value in points)} | {grows} |")
    return "\n".join(lines)


def _curves(real: dict[int, Values], played: dict[int, Values]) -> dict[str, list[tuple[float, float]]]:
    names = {
        "node 0's CPU ms for joining": "CPU ms to join",
        "node 0's KB sent by then": "KB sent to join",
        "node 0's peak MB": "peak MB",
        "at rest: messages/s from node 0": "messages/s at rest",
        "at rest: node 0's CPU ms/s": "CPU ms/s at rest",
    }
    return {
        f"{label}, {how}": [(nodes, values[name]) for nodes, values in sorted(measured.items())]
        for how, measured in (("real", real), ("played", played))
        for name, label in names.items()
        if measured
    }


if __name__ == "__main__":
    sys.exit(main())
