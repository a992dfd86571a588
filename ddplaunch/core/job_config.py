"""The job config: the options of a job, and what is derived from them."""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.base.options import Options
from ddplaunch.core.options import Elastic, Inspecting, Stopping

MIN_INSPECT_GRACE_S = 5.0  # with a shorter --grace, ranks are not inspected before they are stopped


class JobConfig(Struct, frozen=True):
    """The options, and the values that are derived from them for the whole job; those of node 0 apply."""

    min_nodes: int = 1
    max_nodes: int = 1  # that may join, spares included; equal to min_nodes unless the job is elastic or has spares
    without_ranks: int = 0  # how many of these, the last ones, never get ranks: features use them; not with spares
    address: str = ""  # node 0's, from --master-addr
    address_may_be_unknown: bool = False  # a name that may not resolve yet
    port: int | None = None  # node 0's control port; None if the nodes are not connected
    folder: str = ""  # the current one on node 0: files below it are named relative to it
    shared_log: bool = False  # all nodes print into one log: notes to all nodes are printed by node 0 only
    options: Options = Options({}, {})

    @property
    def is_elastic(self) -> bool:
        return self.min_nodes < self.max_nodes

    @property
    def is_multi_node(self) -> bool:
        """Whether messages must name the node."""
        return self.max_nodes > 1

    @property
    def inspects_before_stop(self) -> bool:
        """Whether ranks are inspected before they are stopped: a short grace leaves no time for it."""
        return not self.options[Inspecting].no_inspect and self.options[Stopping].grace >= MIN_INSPECT_GRACE_S

    @property
    def max_active_nodes(self) -> int:
        """The maximum number of nodes with ranks."""
        return self.max_nodes - self.options[Elastic].spares - self.without_ranks

    def may_have_ranks(self, node_rank: int) -> bool:
        """Whether this node may ever get ranks."""
        return node_rank < self.max_nodes - self.without_ranks

    @property
    def nnodes_text(self) -> str:
        """--nnodes as on the command line: "4", "2:4" or "4 --spares 2"."""
        spares = self.options[Elastic].spares
        most = self.max_nodes - spares
        nodes = f"{self.min_nodes}:{most}" if self.min_nodes < most else str(most)
        return f"{nodes} --spares {spares}" if spares else nodes
