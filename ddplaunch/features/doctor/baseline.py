"""Baseline files of ``doctor --save``: measurements, against which ``--compare`` reports what has become slower."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ddplaunch import __version__
from ddplaunch.base.errors import LaunchError, UsageError
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.safe_files import open_for_writing, read_user_file
from ddplaunch.base.text import format_size, join_names
from ddplaunch.base.types import Name, TextLine, parse
from ddplaunch.features.doctor.benchmark import SIZES
from ddplaunch.features.doctor.checks import Finding, Findings, Severity
from ddplaunch.features.doctor.checks.kernel import is_cpu_time_short
from ddplaunch.features.doctor.examination import DoctorResults, bandwidth_of_largest_size
from ddplaunch.features.doctor.findings import format_flops, join_node_names

MAX_BYTES = 16 << 20
TOLERANCE_FACTORS = {"FLOP/s": 1.3, "B/s": 1.3, "s": 3.0}
"""Factor by which a measurement may be worse than the saved one; runs on healthy machines differ by half of that."""

CPU_TOLERANCE_FACTOR = 2.5
"""The same for bandwidths of gloo, which share the CPUs with everything else that runs there."""

Key = tuple[str, tuple[str, ...]]

_MAX_FINDINGS = 5  # that are listed; the others are counted


class Measurement(Struct, frozen=True):
    """One measured speed or time, of some hosts."""

    what: TextLine  # "all_reduce (nccl)"
    hosts: tuple[Name, ...]
    unit: Literal["FLOP/s", "B/s", "s"]
    value: Annotated[float, Meta(ge=1e-12, le=1e21)]

    @property
    def text(self) -> str:
        match self.unit:
            case "s":
                return f"{self.value * 1e6:.0f} us"
            case "B/s":
                return f"{format_size(round(self.value))}/s"
        return format_flops(self.value)


class Baseline(Struct, frozen=True):
    """The content of a baseline file."""

    ddplaunch: TextLine
    date: TextLine  # "2026-11-24 01:10"
    hosts: tuple[Name, ...]
    figures: tuple[Measurement, ...]


def read_baseline(path: str) -> Baseline:
    """Read a baseline file. Raises UsageError if it is missing or invalid."""
    try:
        return parse(read_user_file(path, MAX_BYTES), Baseline)
    except OSError as error:
        raise UsageError(f"--compare {path}: {error.strerror}", "ddplaunch doctor --save FILE writes one") from None
    except ProtocolError:
        what = f"--compare {path}: not a file written by ddplaunch doctor --save"
        raise UsageError(what, "write a new one with --save") from None


def check_writable(path: str) -> None:
    """Raise UsageError if the file cannot be written."""
    try:
        os.close(open_for_writing(path, 0))
    except OSError as error:
        raise UsageError(f"--save {path}: {error.strerror}", "choose a writable file") from None


def save_baseline(examination: DoctorResults, path: str) -> None:
    """Write the measurements of an examination. Raises LaunchError if that fails."""
    date, hosts = time.strftime("%Y-%m-%d %H:%M"), tuple(node.name for node in examination.nodes)
    baseline = Baseline(__version__, date, hosts, tuple(list_measurements(examination)))
    try:
        with open(open_for_writing(path, os.O_TRUNC), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(baseline)) + b"\n")
    except OSError as error:
        raise LaunchError(f"--save {path}: {error.strerror}") from None


def list_measurements(examination: DoctorResults) -> Iterator[Measurement]:
    """Yield all measurements of an examination."""
    for power in examination.powers:
        yield Measurement(f"matrices on {power.device}", (examination.name(power.node),), "FLOP/s", power.flops)
    for speed in (*examination.speeds, *examination.together):
        if len(speed.seconds) > 1 and not speed.error:
            hosts = tuple(map(examination.name, speed.nodes))
            large = "large " if len(speed.seconds) > len(SIZES) else ""
            yield Measurement(f"{large}{speed.name} ({speed.backend})", hosts, "B/s", bandwidth_of_largest_size(speed))
            yield Measurement(f"{speed.name} of 4 B ({speed.backend})", hosts, "s", speed.seconds[0])


def find_slower_than_baseline(examination: DoctorResults, saved: Baseline) -> Findings:
    """Report measurements that are slower than in the baseline; of nodes with busy CPUs, only that they are busy."""
    busy = [node.name for node in examination.nodes if node.facts and is_cpu_time_short(node.facts)]
    best = _index_best(list_measurements(examination))
    before = {key: old for key, old in _index_best(saved.figures).items() if key in best and best[key].unit == old.unit}
    if not before:
        text = f"no measurement in common with {saved.date}, on {join_names(saved.hosts)}"
        yield Finding(Severity.NOTE, "--compare", text, "save a baseline of these hosts: --save FILE")
    elif busy:
        text = f"not compared with {saved.date}: its CPUs are busy"
        yield Finding(Severity.NOTE, join_node_names(busy), text, "compare again when nothing else runs there")
    worse = {
        key: factor
        for key, old in before.items()
        if (factor := _slowdown(best[key], old)) > _tolerance(old) and set(busy).isdisjoint(key[1])
    }
    reported = set[Key]()
    for what in dict.fromkeys(what for what, _ in worse):
        for host in dict.fromkeys(host for _, hosts in worse for host in hosts):
            own = [key for key in before if key[0] == what and host in key[1] and len(key[1]) == 2]
            if len(own) > 1 and all(key in worse for key in own) and not reported >= set(own):
                reported.update(own)
                least = min(own, key=worse.__getitem__)
                yield _make_finding(f"{what} with any other node", host, best[least], before[least], saved.date)
    rest = [key for key in sorted(worse, key=worse.__getitem__, reverse=True) if key not in reported]
    for key in rest[:_MAX_FINDINGS]:
        yield _make_finding(key[0], join_node_names(key[1]), best[key], before[key], saved.date)
    if len(rest) > _MAX_FINDINGS:
        text = f"{len(rest) - _MAX_FINDINGS} more measurements are worse than on {saved.date}"
        yield Finding(Severity.WARNING, "--compare", text, "--json lists all measurements")


def _make_finding(what: str, subject: str, now: Measurement, then: Measurement, date: str) -> Finding:
    text = f"{what}: {now.text}; it was {then.text} on {date}"
    hint = "check what has changed: drivers, clocks, cables, and what else runs"
    return Finding(Severity.WARNING, subject, text, hint)


def _index_best(measured: Iterable[Measurement]) -> dict[Key, Measurement]:
    """Index measurements by subject and hosts; of several per key keep the best: CPU processes slow one another."""
    best_by_key: dict[Key, Measurement] = {}
    for measurement in measured:
        key = (measurement.what, tuple(sorted(measurement.hosts)))
        best = min if measurement.unit == "s" else max
        best_by_key[key] = best(measurement, best_by_key.get(key, measurement), key=lambda each: each.value)
    return best_by_key


def _slowdown(now: Measurement, then: Measurement) -> float:
    """Return the factor by which a measurement is slower than an earlier one."""
    return now.value / then.value if now.unit == "s" else then.value / now.value


def _tolerance(measurement: Measurement) -> float:
    of_cpus = measurement.unit == "B/s" and "gloo" in measurement.what
    return CPU_TOLERANCE_FACTOR if of_cpus else TOLERANCE_FACTORS[measurement.unit]
