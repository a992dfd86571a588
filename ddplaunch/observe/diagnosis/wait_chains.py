"""Follows chains of ranks that each wait for the next one: finds where a chain ends, and cycles."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

_MAX_ARROWS = 10


class ChainEnd(NamedTuple):
    """The end of a chain of ranks in one function that each send to the next, or receive from it."""

    rank: int | None = None  # the first rank that is not in that function; None if unknown
    cycle: tuple[int, ...] = ()  # the ranks of the cycle that the chain ends in; () without one
    has_matching_partner: bool = False  # the last rank's partner is in the matching call


def group_by_chain_end(partners: Mapping[int, int | None], matched: Collection[int]) -> dict[ChainEnd, list[int]]:
    """Group the ranks in one function by the end of their chain.

    ``partners``: by rank, the one that it sends to or receives from; ``matched``: the ranks whose partner is in the
    matching call.
    """
    ends: dict[int, ChainEnd] = dict.fromkeys(matched, ChainEnd(has_matching_partner=True))
    for first in sorted(partners):
        chain: list[int] = []
        passed: set[int] = set()
        rank: int | None = first
        while rank is not None and rank in partners and rank not in ends and rank not in passed:
            chain.append(rank)
            passed.add(rank)
            rank = partners[rank]
        if rank in passed:
            end = ChainEnd(cycle=_rotate_to_lowest(chain[chain.index(rank) :]))
        elif rank in ends and rank not in matched:
            end = ends[rank]
        else:
            end = ChainEnd(rank)
        ends.update(dict.fromkeys(chain, end))
    together: dict[ChainEnd, list[int]] = {}
    for rank in sorted(partners):
        together.setdefault(ends[rank], []).append(rank)
    return together


def find_cycle(nexts: Mapping[int, int]) -> tuple[int, ...]:
    """Return the cycle that the lowest rank's chain ends in; ``nexts``: by rank, the rank that it waits for."""
    chain: list[int] = []
    passed: set[int] = set()
    rank = min(nexts)
    while rank not in passed:
        chain.append(rank)
        passed.add(rank)
        rank = nexts[rank]
    return _rotate_to_lowest(chain[chain.index(rank) :])


def format_cycle(cycle: Sequence[int]) -> str:
    """Format a cycle as "0 → 1 → 3 → 2 → 0"; a long one is shortened in the middle."""
    around = [*map(str, cycle), str(cycle[0])]
    if len(around) > _MAX_ARROWS:
        around = [*around[: _MAX_ARROWS - 3], "…", *around[-2:]]
    return " → ".join(around)


def _rotate_to_lowest(cycle: Sequence[int]) -> tuple[int, ...]:
    first = cycle.index(min(cycle))
    return (*cycle[first:], *cycle[:first])
