"""What was measured, kept in a file, so that a later examination finds what has become slower since."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec

from ddplaunch import __version__
from ddplaunch.commands.doctor.benchmark import SIZES
from ddplaunch.commands.doctor.checks import Finding, Findings, Severity
from ddplaunch.commands.doctor.checks.kernel import is_cpu_throttled
from ddplaunch.commands.doctor.comparison import format_flops, join_node_names
from ddplaunch.commands.doctor.examination import Examination, largest_bus_bandwidth
from ddplaunch.dataclass import dataclass
from ddplaunch.errors import LaunchError, UsageError
from ddplaunch.files import open_for_writing, read_user_file
from ddplaunch.wire.bounds import Name, TextLine
from ddplaunch.wire.frames import ProtocolError
from ddplaunch.wire.typed import convert
from ddplaunch.words import format_size, join_names

MAX_BYTES = 16 << 20
TOLERANCE_FACTORS = {"FLOP/s": 1.3, "B/s": 1.3, "s": 3.0}
"""By how much a figure may be worse than the saved one; runs on sound machines differ by half of that."""

CPU_TOLERANCE_FACTOR = 2.5
"""What a bandwidth of gloo may lose: whatever else runs on the CPUs takes its part."""

Key = tuple[str, tuple[str, ...]]

_MAX_FINDINGS = 5  # findings that are told one by one


def _positive(value: float) -> float:
    if not 1e-12 <= value <= 1e21:
        raise ValueError("a figure out of range")
    return value


@dataclass(frozen=True)
class Measurement:
    """One thing that was measured."""

    what: TextLine  # "all_reduce (nccl)"
    hosts: tuple[Name, ...]
    unit: Literal["FLOP/s", "B/s", "s"]
    value: Annotated[float, _positive]

    @property
    def text(self) -> str:
        match self.unit:
            case "s":
                return f"{self.value * 1e6:.0f} us"
            case "B/s":
                return f"{format_size(round(self.value))}/s"
        return format_flops(self.value)


@dataclass(frozen=True)
class Baseline:
    """The file."""

    ddplaunch: TextLine
    date: TextLine  # "2026-11-24 01:10"
    hosts: tuple[Name, ...]
    figures: tuple[Measurement, ...]


def read_baseline(path: str) -> Baseline:
    """Raises UsageError where there is no such file."""
    try:
        found = convert(msgspec.json.decode(read_user_file(path, MAX_BYTES)), Baseline)
        assert isinstance(found, Baseline)
        return found
    except OSError as error:
        raise UsageError(f"--compare {path}: {error.strerror}", "ddplaunch doctor --save FILE writes one") from None
    except (ProtocolError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        what = f"--compare {path}: not a file that ddplaunch doctor --save has written"
        raise UsageError(what, "write it anew, with --save") from None


def check_writable(path: str) -> None:
    """Raises UsageError where nothing can be saved there."""
    try:
        os.close(open_for_writing(path, 0))
    except OSError as error:
        raise UsageError(f"--save {path}: {error.strerror}", "name a file that can be written") from None


def save_baseline(found: Examination, path: str) -> None:
    """Write what was measured. Raises LaunchError."""
    date = time.strftime("%Y-%m-%d %H:%M")
    baseline = Baseline(__version__, date, tuple(node.name for node in found.nodes), tuple(list_measurements(found)))
    try:
        with open(open_for_writing(path, os.O_TRUNC), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(baseline)) + b"\n")
    except OSError as error:
        raise LaunchError(f"--save {path}: {error.strerror}") from None


def list_measurements(found: Examination) -> Iterator[Measurement]:
    """All that was measured."""
    for power in found.powers:
        yield Measurement(f"matrices on {power.device}", (found.name(power.node),), "FLOP/s", power.flops)
    for speed in (*found.speeds, *found.together):
        if len(speed.seconds) > 1 and not speed.error:
            hosts = tuple(map(found.name, speed.nodes))
            large = "large " if len(speed.seconds) > len(SIZES) else ""
            yield Measurement(f"{large}{speed.name} ({speed.backend})", hosts, "B/s", largest_bus_bandwidth(speed))
            yield Measurement(f"{speed.name} of 4 B ({speed.backend})", hosts, "s", speed.seconds[0])


def find_slower(found: Examination, saved: Baseline) -> Findings:
    """What is slower than it was; not on machines that something else keeps busy."""
    busy = [node.name for node in found.nodes if node.facts and is_cpu_throttled(node.facts)]
    best = _best(list_measurements(found))
    before = {key: old for key, old in _best(saved.figures).items() if key in best and best[key].unit == old.unit}
    if not before:
        text = f"nothing was measured that was measured on {saved.date} too, on {join_names(saved.hosts)}"
        yield Finding(Severity.NOTE, "--compare", text, "save an examination of these hosts: --save FILE")
    elif busy:
        text = f"not compared with what it was on {saved.date}, as its CPUs have too little time"
        yield Finding(Severity.NOTE, join_node_names(busy), text, "compare again when nothing else runs there")
    worse = {
        key: factor
        for key, old in before.items()
        if (factor := _slowdown(best[key], old)) > _tolerance(old) and set(busy).isdisjoint(key[1])
    }
    told = set[Key]()
    for what in dict.fromkeys(what for what, _ in worse):
        for host in dict.fromkeys(host for _, hosts in worse for host in hosts):
            own = [key for key in before if key[0] == what and host in key[1] and len(key[1]) == 2]
            if len(own) > 1 and all(key in worse for key in own) and not told >= set(own):
                told.update(own)
                least = min(own, key=worse.__getitem__)
                yield _make_finding(f"{what} with any other node", host, best[least], before[least], saved.date)
    rest = [key for key in sorted(worse, key=worse.__getitem__, reverse=True) if key not in told]
    for key in rest[:_MAX_FINDINGS]:
        yield _make_finding(key[0], join_node_names(key[1]), best[key], before[key], saved.date)
    if len(rest) > _MAX_FINDINGS:
        text = f"{len(rest) - _MAX_FINDINGS} more figures are worse than on {saved.date}"
        yield Finding(Severity.WARNING, "--compare", text, "--json shows what was measured")


def _make_finding(what: str, subject: str, now: Measurement, then: Measurement, date: str) -> Finding:
    text = f"{what}: {now.text}, and {then.text} on {date}"
    return Finding(Severity.WARNING, subject, text, "see what has changed: drivers, clocks, cables, and what else runs")


def _best(measured: Iterable[Measurement]) -> dict[Key, Measurement]:
    """By what and hosts; of the CPUs of one node the fastest, as its processes disturb one another."""
    found: dict[Key, Measurement] = {}
    for figure in measured:
        key = (figure.what, tuple(sorted(figure.hosts)))
        found[key] = max(figure, found.get(key, figure), key=_higher_is_better)
    return found


def _higher_is_better(figure: Measurement) -> float:
    return -figure.value if figure.unit == "s" else figure.value


def _slowdown(now: Measurement, then: Measurement) -> float:
    """How many times worse it is."""
    return now.value / then.value if now.unit == "s" else then.value / now.value


def _tolerance(figure: Measurement) -> float:
    of_cpus = figure.unit == "B/s" and "gloo" in figure.what
    return CPU_TOLERANCE_FACTOR if of_cpus else TOLERANCE_FACTORS[figure.unit]
