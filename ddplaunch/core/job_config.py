"""The job config: options of the whole job, as number of nodes, time limits and restarts."""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.base.options import Options

MIN_INSPECT_GRACE_S = 5.0  # with a shorter --grace, ranks are not inspected before they are stopped


class JobConfig(Struct, frozen=True):
    """Options of the whole job; node 0's values apply. Times in seconds."""

    min_nodes: int = 1
    max_nodes: int = 1  # that may join; equal to min_nodes unless the job is elastic or has spares
    spares: int = 0  # how many of these are standby nodes without ranks
    run_id: str | None = None  # --run-id
    token: str | None = None  # secret that peers must prove to know; None: any peer with the same run id may join
    address: str = ""  # node 0's, from --master-addr
    address_may_be_unknown: bool = False  # a name that may not resolve yet
    port: int | None = None  # node 0's control port; None if the nodes are not connected
    interface: str | None = None  # None: that of the route to node 0
    join_timeout: float = 600.0
    join_window: float = 30.0  # how long an elastic job that could start waits for more nodes
    heartbeat_timeout: float = 15.0  # silence after which a node counts as lost
    grace: float = 30.0  # between SIGTERM and SIGKILL
    preempt_grace: float = 90.0  # between the preemption notice and SIGTERM
    max_restarts: int = 0
    restart_on: str = "any"  # or "transient", "always"; "any": unless the same failure came twice
    restart_backoff: float = 0.0
    min_uptime: float = 5.0
    max_membership_changes: int = 100
    grow: bool = False  # whether a node that joins later interrupts the attempt
    allow_mismatch: bool = False  # whether differing versions only give a warning
    inspect: bool = True  # whether ranks are inspected before they are stopped
    timeout: float | None = None  # of the whole job, from the first start of ranks
    folder: str = ""  # the current one on node 0: files below it are named relative to it
    shared_log: bool = False  # all nodes print into one log: notes to all nodes are printed by node 0 only
    options: Options = Options({}, {})  # for the job sides of features

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
        return self.inspect and self.grace >= MIN_INSPECT_GRACE_S

    @property
    def max_active_nodes(self) -> int:
        """How many nodes have ranks at most."""
        return self.max_nodes - self.spares

    @property
    def nnodes_text(self) -> str:
        """--nnodes as on the command line: "4", "2:4" or "4 --spares 2"."""
        most = self.max_active_nodes
        nodes = f"{self.min_nodes}:{most}" if self.min_nodes < most else str(most)
        return f"{nodes} --spares {self.spares}" if self.spares else nodes
