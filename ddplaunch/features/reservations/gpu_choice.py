"""Chooses GPUs among those that are free: those with the fastest links between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Links = Mapping[tuple[int, int], int]
"""The distance of each pair of GPUs, the lower index first."""


def choose_neighbours(free: Sequence[int], count: int, distances: Links) -> tuple[int, ...] | None:
    """Return ``count`` of the ``free`` GPUs, those that are nearest to each other; None if there are too few.

    Of equally near groups, the one that is farthest from the GPUs that stay free: a linked pair stays whole for the
    next job. A group starts with each GPU in turn, and the nearest GPUs are added: that is fast also with 16 GPUs.
    """
    if len(free) < count:
        return None
    candidates = [_grow_group(first, free, count, distances) for first in free]

    def cost(chosen: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        rest = [each for each in free if each not in chosen]
        inner = sum(_distance(distances, one, other) for one in chosen for other in chosen if one < other)
        return inner, -sum(_distance(distances, one, other) for one in chosen for other in rest), chosen

    return min(candidates, key=cost)


def _grow_group(first: int, free: Sequence[int], count: int, distances: Links) -> tuple[int, ...]:
    chosen = [first]
    while len(chosen) < count:
        others = (each for each in free if each not in chosen)
        chosen.append(min(others, key=lambda one: (sum(_distance(distances, one, other) for other in chosen), one)))
    return tuple(sorted(chosen))


def _distance(distances: Links, one: int, other: int) -> int:
    return distances.get((min(one, other), max(one, other)), 0)
