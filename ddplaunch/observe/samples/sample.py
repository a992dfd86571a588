"""Samples of a node: usage and progress of its ranks and GPUs over an interval; merging and downsampling. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

from msgspec import Struct

from ddplaunch.observe.diagnosis.inspection import Inspection

SAMPLE_SPAN_S = 15.0  # seconds that a sample covers normally, in the first hour
MAX_COMPARABLE_RATE = 100.0  # collectives a second; at higher rates, ranks reply too far apart in time to compare them


class RankSample(NamedTuple):
    """Averages of one rank with its descendants; None is unknown."""

    rank: int
    cpus: float | None  # busy CPUs
    memory: float | None  # bytes, the maximum, without file-backed pages
    read: float | None  # bytes a second, from files and pipes
    written: float | None
    collectives: float | None  # a second
    behind: float | None  # share of the measurements at which another rank of its group had entered more collectives


class GpuSample(NamedTuple):
    """Averages of one GPU; None is unknown."""

    gpu: int  # its index
    rank: int  # the rank that uses it, -1 if unknown
    busy: float | None  # percent
    memory: float | None  # bytes, the maximum
    power: float | None  # watts
    slowed: float | None  # share of the measurements at which heat or the power supply throttled it


class ProgramSample(NamedTuple):
    """Averages of one program beside the ranks, with its descendants; None is unknown."""

    program: str
    cpus: float | None  # busy CPUs
    memory: float | None  # bytes, the maximum, without file-backed pages
    quiet: float | None  # seconds since its last output, at the end


_Row = tuple[Any, ...]


class NodeSample(Struct, frozen=True):
    """Usage of a node's ranks and GPUs in the ``seconds`` before ``time`` (seconds since the epoch)."""

    time: float
    seconds: float
    attempt: int
    ranks: tuple[RankSample, ...]
    gpus: tuple[GpuSample, ...] = ()
    programs: tuple[ProgramSample, ...] = ()

    def to_json(self) -> str:
        """Return the line for the file of samples."""
        ranks, gpus, programs = (",".join(map(_row_to_json, rows)) for rows in (self.ranks, self.gpus, self.programs))
        more = f',"programs":[{programs}]' if self.programs else ""
        head = f'"time":{self.time:.2f},"seconds":{self.seconds:.2f},"attempt":{self.attempt}'
        return f'{{{head},"ranks":[{ranks}],"gpus":[{gpus}]{more}}}\n'


def _row_to_json(row: Iterable[float | str | None]) -> str:
    texts = (f"{each:.4g}" if isinstance(each, float) else json.dumps(each) for each in row)
    return f"[{','.join(texts)}]"


def downsample(readings: Iterable[NodeSample], most: int) -> list[NodeSample]:
    """Merge neighbouring samples of an attempt until at most ``most`` are left, each covering about the same time.

    Of very many short attempts only the last are kept. Merged values are time-weighted means; of memory, the maximum.
    """
    merged = list(readings)
    grain, longest = 2 * SAMPLE_SPAN_S, sum(each.seconds for each in merged)
    while len(merged) > most:
        merged = _merge_neighbours(merged, grain)
        if grain > longest:
            return merged[-most:]
        grain *= 2
    return merged


def average(readings: Iterable[NodeSample]) -> NodeSample | None:
    """Merge all samples into one, also over attempts; None without samples."""
    found = [*readings]
    return reduce(_merge_two, found) if found else None


def _merge_neighbours(readings: Sequence[NodeSample], grain: float) -> list[NodeSample]:
    merged = [readings[0]]
    for reading in readings[1:]:
        last = merged[-1]
        if reading.attempt == last.attempt and last.seconds + reading.seconds <= grain:
            merged[-1] = _merge_two(last, reading)
        else:
            merged.append(reading)
    return merged


def _merge_two(first: NodeSample, last: NodeSample) -> NodeSample:
    share = last.seconds / ((first.seconds + last.seconds) or 1.0)
    return NodeSample(
        last.time,
        first.seconds + last.seconds,
        last.attempt,
        tuple(RankSample(*each) for each in _merge_rows(first.ranks, last.ranks, share, 1, 2)),
        tuple(GpuSample(*each) for each in _merge_rows(first.gpus, last.gpus, share, 2, 3)),
        tuple(_merge_programs(first, last, share)),
    )


def _merge_programs(first: NodeSample, last: NodeSample, share: float) -> Iterator[ProgramSample]:
    quiet = {each.program: each.quiet for each in (*first.programs, *last.programs)}
    for row in _merge_rows(first.programs, last.programs, share, 1, 2):
        yield ProgramSample(*row)._replace(quiet=quiet[row[0]])


def _merge_rows(
    first: Iterable[_Row], last: Iterable[_Row], share: float, names: int, memory: int
) -> Iterator[list[Any]]:
    """Merge rows with equal first fields: keep the first ``names`` fields, and the maximum of field ``memory``."""
    before: dict[Any, _Row] = {row[0]: row for row in first}
    after: dict[Any, _Row] = {row[0]: row for row in last}
    for key in sorted(before | after):
        merged = [*after.get(key, before.get(key, ()))]
        for index, old in enumerate(before.get(key, ())):
            new = merged[index]
            if new is None:
                merged[index] = old
            elif index >= names and old is not None:
                merged[index] = max(old, new) if index == memory else old + (new - old) * share
        yield merged


def ranks_behind(inspection: Inspection) -> frozenset[int]:
    """Return the ranks that had entered fewer collectives than another rank in one of their groups."""
    of_group: dict[str, dict[int, int]] = defaultdict(dict)
    for rank in inspection.ranks:
        for each in rank.groups:
            of_group[each.group][rank.rank] = each.enqueued
    behind = set[int]()
    for entered in of_group.values():
        most = max(entered.values())
        behind.update(rank for rank, number in entered.items() if number < most)
    return frozenset(behind)
