"""Whose output is shown: of each rank its stdout, its stderr, both or neither."""

from __future__ import annotations

from dataclasses import dataclass

from ddplaunch.plan.layout import Rank


@dataclass(frozen=True)
class Rule:
    """Some ranks, and which of their descriptors 1 and 2 are shown.

    ``number`` is a rank, or a local rank on every node where ``local``; None is all ranks.
    """

    number: int | None
    local: bool = False
    streams: frozenset[int] = frozenset({1, 2})

    def names(self, rank: Rank) -> bool:
        return self.number is None or self.number == (rank.local_rank if self.local else rank.rank)


@dataclass(frozen=True)
class Shown:
    """What ``--show`` says; of several rules that name a rank the last counts, and without one it is not shown."""

    rules: tuple[Rule, ...] = (Rule(None),)

    def streams(self, rank: Rank) -> frozenset[int]:
        return next((rule.streams for rule in reversed(self.rules) if rule.names(rank)), frozenset())
