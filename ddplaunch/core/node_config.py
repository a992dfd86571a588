"""The node config: the options of one node, and the values derived from them, such as which output it shows."""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.base.options import Options
from ddplaunch.core.zygote_plan import ZygoteSettings
from ddplaunch.system.plan.rank_layout import Rank


class ShowRule(Struct, frozen=True):
    """One rule of ``--show``: for these ranks, show stdout (1), stderr (2), both or neither."""

    rank: int | None  # None: all ranks
    is_local_rank: bool = False  # whether ``rank`` is a local rank, of every node
    streams: frozenset[int] = frozenset({1, 2})

    def matches(self, rank: Rank) -> bool:
        return self.rank is None or self.rank == (rank.local_rank if self.is_local_rank else rank.rank)


class ShowRules(Struct, frozen=True):
    """The value of ``--show``: the last rule that matches a rank applies; a rank without a rule is not shown."""

    rules: tuple[ShowRule, ...]
    full_tracebacks: bool = True  # also show the tracebacks of secondary failures in a terminal

    def streams_for(self, rank: Rank) -> frozenset[int]:
        return next((rule.streams for rule in reversed(self.rules) if rule.matches(rank)), frozenset())


class ScreenOptions(Struct, frozen=True):
    """How a screen shows the output."""

    prefix: str  # before each line of a rank: core/prefix.py
    output_timeout_s: float  # stop waiting for a reader of the output that reads nothing for so long
    quiet_s: float  # seconds after which a wait for the other nodes is reported
    colour: bool
    merge: bool | None = False  # whether equal lines of several ranks are merged; None: in a terminal


class NodeConfig(Struct, frozen=True):
    """The options, and the values that are derived from them for this node."""

    zygote: ZygoteSettings
    show: ShowRules
    screen: ScreenOptions
    inspect: bool  # whether ranks can be inspected
    options: Options
