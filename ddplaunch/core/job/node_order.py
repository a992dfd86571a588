"""Orders nodes so that those of one domain, which share the fastest links, have contiguous node ranks. Pure.

A domain is a name: an NVLink fabric, a switch, or a label of the user's. Node 0 stays first. A group of ``segment``
nodes is never split among domains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ddplaunch.base.text import join_names


class NodePlace(NamedTuple):
    """A node that may have ranks: its number, given when it joined, and its domain; "" is unknown."""

    node_rank: int
    domain: str


def order_nodes(
    places: Sequence[NodePlace], before: Sequence[NodePlace], failed: Collection[int], count: int, segment: int = 1
) -> list[int]:
    """Return the node ranks of at most ``count`` nodes, in the order of their ranks; fewer, to split no segment.

    Args:
        places: the nodes that may have ranks, node 0 first.
        before: the nodes with ranks in the attempt before, in order, also nodes that are gone. They keep their ranks.
        failed: nodes that others replace, of the same domain if possible.
    """
    stay = ({each.node_rank for each in before} & {each.node_rank for each in places}) - {*failed}
    index_of = {each.node_rank: index for index, each in reversed([*enumerate([*before, *places])])}
    first = {each.domain: index for index, each in reversed([*enumerate([*before, *places])])}
    first[places[0].domain] = -1
    if segment > 1:
        chosen = _choose_segments(places, stay, failed, count, segment)
    else:
        chosen = _choose_nodes(places, before, stay, failed, first)[:count]
    order = sorted(chosen, key=lambda each: (first[each.domain], each is not places[0], index_of[each.node_rank]))
    return [each.node_rank for each in order]


def _choose_nodes(
    places: Sequence[NodePlace],
    before: Sequence[NodePlace],
    stay: Collection[int],
    failed: Collection[int],
    first: Mapping[str, int],
) -> list[NodePlace]:
    """Return the nodes that keep ranks, then nodes of domains that lost one, then whole domains, the largest first."""
    lost = {each.domain for each in before if each.node_rank not in stay}
    sizes = Counter(each.domain for each in places)

    def sort_key(place: NodePlace) -> tuple[object, ...]:
        if place is places[0] or place.node_rank in stay:
            return (place is not places[0],)
        is_alone = place.domain not in lost
        by_domain = (first[place.domain] >= 0, -sizes[place.domain], first[place.domain])
        return (2, place.node_rank in failed, is_alone, *(by_domain if is_alone else ()))

    return sorted(places, key=sort_key)


def _choose_segments(
    places: Sequence[NodePlace], stay: Collection[int], failed: Collection[int], count: int, segment: int
) -> list[NodePlace]:
    """Return whole segments, of node 0's domain first, then of those that had the most nodes with ranks."""
    zero, chosen = places[0], list[NodePlace]()
    stayed = Counter(each.domain for each in places if each.node_rank in stay)
    domains = dict.fromkeys(each.domain for each in places if each.domain)
    for domain in sorted(domains, key=lambda each: (each != zero.domain, -stayed[each])):
        own = [each for each in places if each.domain == domain]
        own.sort(key=lambda each: (each is not zero, each.node_rank not in stay, each.node_rank in failed))
        chosen += own[: min(len(own), count - len(chosen)) // segment * segment]
    return chosen if zero in chosen else []  # all others are connected to node 0, which has the first ranks


def describe_domains(places: Sequence[NodePlace]) -> str:
    """Return how many nodes each domain has: "rack-1 4, rack-2 3, 2 without"."""
    sizes = Counter(each.domain for each in places)
    unknown = sizes.pop("", 0)
    listed = [f"{domain} {size}" for domain, size in sorted(sizes.items())]
    return join_names([*listed, *([f"{unknown} without"] if unknown else [])])
