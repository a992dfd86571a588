"""Chains of ranks that each wait for the next: where they end, and in which cycles."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

_MAX_ARROWS = 10


class ChainEnd(NamedTuple):
    """Where a chain ends, of ranks in one function that each send to the next or receive from it."""

    rank: int | None = None  # the first that is not in that function; None where it is not known
    cycle: tuple[int, ...] = ()  # where it comes back to one of its own
    has_matching_partner: bool = False  # whether the partner is there, in the call that goes with theirs


def group_by_chain_end(partners: Mapping[int, int | None], matched: Collection[int]) -> dict[ChainEnd, list[int]]:
    """Group the ranks of one function that wait for the same one in the end.

    ``partners`` says of each whom it sends to or receives from, ``met`` which of them have their partner.
    """
    found: dict[int, ChainEnd] = dict.fromkeys(matched, ChainEnd(has_matching_partner=True))
    for first in sorted(partners):
        chain: list[int] = []
        passed: set[int] = set()
        rank: int | None = first
        while rank is not None and rank in partners and rank not in found and rank not in passed:
            chain.append(rank)
            passed.add(rank)
            rank = partners[rank]
        if rank in passed:
            end = ChainEnd(cycle=_rotate_to_lowest(chain[chain.index(rank) :]))
        elif rank in found and rank not in matched:
            end = found[rank]
        else:
            end = ChainEnd(rank)
        found.update(dict.fromkeys(chain, end))
    together: dict[ChainEnd, list[int]] = {}
    for rank in sorted(partners):
        together.setdefault(found[rank], []).append(rank)
    return together


def find_cycle(nexts: Mapping[int, int]) -> tuple[int, ...]:
    """The cycle that the lowest rank comes to; ``nexts`` says of each for which of them it waits."""
    chain: list[int] = []
    passed: set[int] = set()
    rank = min(nexts)
    while rank not in passed:
        chain.append(rank)
        passed.add(rank)
        rank = nexts[rank]
    return _rotate_to_lowest(chain[chain.index(rank) :])


def format_cycle(cycle: Sequence[int]) -> str:
    """Name a cycle: "0 → 1 → 3 → 2 → 0"; of a long one its beginning and its end."""
    around = [*map(str, cycle), str(cycle[0])]
    if len(around) > _MAX_ARROWS:
        around = [*around[: _MAX_ARROWS - 3], "…", *around[-2:]]
    return " → ".join(around)


def _rotate_to_lowest(cycle: Sequence[int]) -> tuple[int, ...]:
    first = cycle.index(min(cycle))
    return (*cycle[first:], *cycle[:first])
