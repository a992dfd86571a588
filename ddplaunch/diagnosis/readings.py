"""What ranks and GPUs of a node did and used, from look to look: rates, who is behind, and thinning. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

from ddplaunch.dataclass import dataclass
from ddplaunch.diagnosis.inspection import Inspection

SAMPLE_SPAN_S = 15.0  # seconds that a reading covers, as a rule; at first
MAX_COMPARABLE_RATE = (
    100.0  # collectives a second, above which the ranks' answers are too far apart to tell who is behind
)


class RankSample(NamedTuple):
    """One rank with all that it has started, on average; None is not known."""

    rank: int
    cpus: float | None  # that were busy
    memory: float | None  # bytes at most, without what is in files
    read: float | None  # bytes a second, from files and pipes
    written: float | None
    collectives: float | None  # a second
    behind: float | None  # share of the looks at which it had entered fewer collectives than others of its group


class GpuSample(NamedTuple):
    """One GPU; None is not known."""

    gpu: int  # its index
    rank: int  # that uses it, -1 where that is not known
    busy: float | None  # percent
    memory: float | None  # bytes at most
    power: float | None  # watts
    slowed: float | None  # share of the looks at which its clocks were held down by heat or its power supply


_Row = tuple[float | None, ...]


@dataclass(frozen=True)
class NodeSample:
    """What a node's ranks and GPUs did in ``seconds`` up to ``time``, seconds since the epoch."""

    time: float
    seconds: float
    attempt: int
    ranks: tuple[RankSample, ...]
    gpus: tuple[GpuSample, ...] = ()

    def to_json(self) -> str:
        """One line of a file of readings."""
        ranks, gpus = (",".join(map(_row, rows)) for rows in (self.ranks, self.gpus))
        head = f'"time":{self.time:.2f},"seconds":{self.seconds:.2f},"attempt":{self.attempt}'
        return f'{{{head},"ranks":[{ranks}],"gpus":[{gpus}]}}\n'


def _row(row: Iterable[float | None]) -> str:
    texts = ("null" if each is None else f"{each:.4g}" if isinstance(each, float) else str(each) for each in row)
    return f"[{','.join(texts)}]"


def downsample(readings: Iterable[NodeSample], most: int) -> list[NodeSample]:
    """Put neighbours of an attempt together until there are ``most`` at most, each covering about the same time.

    Of very many short attempts the last ones are left. What is kept is the mean by time, of memory the most.
    """
    found = list(readings)
    grain, longest = 2 * SAMPLE_SPAN_S, sum(each.seconds for each in found)
    while len(found) > most:
        found = _merge_neighbours(found, grain)
        if grain > longest:
            return found[-most:]
        grain *= 2
    return found


def average(readings: Iterable[NodeSample]) -> NodeSample | None:
    """All of them as one, over attempts too; None of none."""
    found = [*readings]
    return reduce(_merge_two, found) if found else None


def _merge_neighbours(readings: Sequence[NodeSample], grain: float) -> list[NodeSample]:
    found = [readings[0]]
    for each in readings[1:]:
        last = found[-1]
        if each.attempt == last.attempt and last.seconds + each.seconds <= grain:
            found[-1] = _merge_two(last, each)
        else:
            found.append(each)
    return found


def _merge_two(first: NodeSample, last: NodeSample) -> NodeSample:
    share = last.seconds / ((first.seconds + last.seconds) or 1.0)
    return NodeSample(
        last.time,
        first.seconds + last.seconds,
        last.attempt,
        tuple(RankSample(*each) for each in _merge_rows(first.ranks, last.ranks, share, 1, 2)),
        tuple(GpuSample(*each) for each in _merge_rows(first.gpus, last.gpus, share, 2, 3)),
    )


def _merge_rows(
    first: Iterable[_Row], last: Iterable[_Row], share: float, names: int, memory: int
) -> Iterator[list[Any]]:
    """The rows of both: their ``names`` are the first of their fields, number ``memory`` is the most of two."""
    before: dict[Any, _Row] = {row[0]: row for row in first}
    after: dict[Any, _Row] = {row[0]: row for row in last}
    for key in sorted(before | after):
        one, other = before.get(key), after.get(key)
        if one is None or other is None:
            yield [*(one or other or ())]
            continue
        yield [
            new if place < names or old is None else old if new is None else _mean(old, new, share, place == memory)
            for place, (old, new) in enumerate(zip(one, other, strict=True))
        ]


def _mean(old: float, new: float, share: float, most: bool) -> float:
    return max(old, new) if most else old + (new - old) * share


def ranks_behind(inspection: Inspection) -> frozenset[int]:
    """The ranks that had entered fewer collectives than another rank in one of their groups."""
    of_group: dict[str, dict[int, int]] = defaultdict(dict)
    for rank in inspection.ranks:
        for each in rank.groups:
            of_group[each.group][rank.rank] = each.enqueued
    return frozenset(
        rank
        for entered in of_group.values()
        for most in [max(entered.values())]
        for rank, number in entered.items()
        if number < most
    )
