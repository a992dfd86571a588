"""Compares runs: what they were (arguments, code, versions, machines) and how they went. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ddplaunch.base.text import format_elapsed, format_size
from ddplaunch.cli.argv_splitter import is_option
from ddplaunch.features.runs.goodput import format_percent
from ddplaunch.features.runs.provenance import Provenance
from ddplaunch.observe.history.run_record import RunRecord

MAX_PACKAGES = 20  # that differ, in the table
MAX_VARIABLES = 20
MAX_TEXT = 60  # characters of a value in the table
UNKNOWN = "-"


class ComparedRun(NamedTuple):
    """A run with what is known of it."""

    record: RunRecord
    provenance: Provenance | None = None
    diff: bytes = b""  # its changes since the commit
    collective_rate: float | None = None  # collectives a second, of its first rank
    step_rate: float | None = None  # steps a second, as rank 0 printed it
    last_line: str = ""  # the last line of rank 0 that has a number


class Row(NamedTuple):
    """A line of the table: a value for each run; "-" is unknown or none."""

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return len({*self.values}) > 1


def compare_arguments(commands: Sequence[Sequence[str]], flags: Collection[str] = ()) -> Iterator[Row]:
    """Yield the options and arguments that are not the same in all commands.

    ``flags``: options that take no value, although a word without dashes may follow.
    """
    found = [read_arguments(words, flags) for words in commands]
    for name in dict.fromkeys(chain.from_iterable(found)):
        row = Row(name, tuple(each.get(name, UNKNOWN) for each in found))
        if row.differs:
            yield row


def read_arguments(words: Sequence[str], flags: Collection[str] = ()) -> dict[str, str]:
    """Return the values of a command line by name: of options, of settings like lr=0.1, and of other words by place."""
    arguments: dict[str, list[str]] = {}
    name, place = "", 0
    for word in (word for word in words if word != "--"):
        head, equals, value = word.partition("=")
        if is_option(word) and not _is_number(word):
            arguments.setdefault(head, []).extend([value] if equals else [])
            name = "" if equals or word in flags else head
        elif equals and head and " " not in head:
            arguments.setdefault(head, []).append(value)
            name = ""
        elif name:
            arguments[name].append(word)
            name = ""
        else:
            place += 1
            arguments[f"argument {place}"] = [word]
    return {name: " ".join(values) or "set" for name, values in arguments.items()}


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def compare_provenance(runs: Sequence[Provenance | None], diffs: Sequence[bytes]) -> Iterator[Row]:
    """Yield a row for each difference between the code, the versions and the machines of runs."""

    def row(name: str, read: Callable[[Provenance], str | None]) -> Row:
        return Row(name, tuple((each and read(each)) or UNKNOWN for each in runs))

    yield from (
        each
        for each in (row("commit", lambda run: run.code.removeprefix("commit ")), _compare_changes(runs, diffs))
        if each.differs
    )
    machine: tuple[tuple[str, Callable[[Provenance], str | None]], ...] = (
        ("Python", lambda run: run.python),
        ("torch", lambda run: run.torch),
        ("CUDA", lambda run: run.cuda),
        ("driver", lambda run: run.driver),
        ("host", lambda run: run.host),
        ("GPUs", lambda run: format_gpus(run.gpus)),
    )
    yield from (each for each in (row(*each) for each in machine) if each.differs)
    known = [each for each in runs if each]
    names = sorted({name for each in known for name in each.packages} - {"torch"})
    packages = [
        each for each in (row(name, _version_reader(name)) for name in names) if each.differs and len(known) > 1
    ]
    yield from packages[:MAX_PACKAGES]
    if len(packages) > MAX_PACKAGES:
        yield Row(f"and {len(packages) - MAX_PACKAGES} more packages", ("…",) * len(runs))
    variables = sorted({name for each in known for name in each.variables}) if len(known) > 1 else []
    rows = [row(f"${name}", lambda run, name=name: "set" if name in run.variables else None) for name in variables]  # type: ignore[misc]
    yield from [each for each in rows if each.differs][:MAX_VARIABLES]


def _version_reader(name: str) -> Callable[[Provenance], str | None]:
    return lambda run: run.packages.get(name)


def _compare_changes(runs: Sequence[Provenance | None], diffs: Sequence[bytes]) -> Row:
    """Compare the changes since the commits: equal changes have the same version number."""
    kinds = {diff: number for number, diff in enumerate(dict.fromkeys(diff for diff in diffs if diff), 1)}
    values = [
        f"version {kinds[diff]}" if diff else "none" if each and each.git else UNKNOWN
        for each, diff in zip(runs, diffs, strict=True)
    ]
    return Row("changes", tuple(values))


def format_gpus(models: Sequence[str]) -> str:
    """Count equal models: "2 x NVIDIA H100"."""
    counts = {model: models.count(model) for model in dict.fromkeys(models)}
    return ", ".join(f"{count} x {model}" if count > 1 else model for model, count in counts.items())


def compare_results(runs: Sequence[ComparedRun], format_state: Callable[[RunRecord], str]) -> Iterator[Row]:
    """Yield rows that say how the runs went, also rows with equal values."""

    def row(name: str, read: Callable[[ComparedRun], str]) -> Row:
        return Row(name, tuple(read(each) or UNKNOWN for each in runs))

    yield row("state", lambda run: format_state(run.record))
    yield row("lasted", lambda run: format_elapsed(run.record.spent.wall_s) if run.record.spent.wall_s else "")
    yield row("goodput", lambda run: format_percent(run.record.spent.goodput))
    yield row("ranks", lambda run: str(run.record.world_size))
    yield row("steps/s", lambda run: _format_rate(run.step_rate))
    yield row("collectives/s", lambda run: _format_rate(run.collective_rate))
    yield row("peak memory", lambda run: format_size(peak) if (peak := peak_memory(run.record)) else "")
    yield row("last line", lambda run: run.last_line)


def _format_rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.3g}"


def peak_memory(record: RunRecord) -> int:
    """Return the peak memory of a rank, in bytes, the highest of all ranks and attempts; 0 if it is unknown."""
    return max((rank.peak_memory for attempt in record.attempts for rank in attempt.ranks), default=0)


def to_json(rows: Sequence[Row], names: Sequence[str]) -> dict[str, Mapping[str, str | None]]:
    """Return rows as JSON: for each row's name the value of each run, null if it is unknown."""
    return {
        row.name: {name: None if value == UNKNOWN else value for name, value in zip(names, row.values, strict=True)}
        for row in rows
    }
