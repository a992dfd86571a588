"""The job config: options of the whole job, as number of nodes, time limits and restarts."""

from __future__ import annotations

from msgspec import Struct

MIN_INSPECT_GRACE_S = 5.0  # with a shorter --grace, ranks are not inspected before they are stopped
DEFAULT_STALL_TIMEOUT_S = 300.0  # without --stall-timeout
EARLY_STALL_CHECK_S = 20.0  # without output, until waiting ranks are inspected
LONG_WAIT = 600.0  # a wait this long (seconds) is reported although ranks print
DEFAULT_GPU_MEMORY_TIMEOUT_S = 30.0  # without --gpu-memory-timeout


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
    checks_nodes: bool = False  # whether every node checks itself before each attempt
    gpu_memory_timeout: float = DEFAULT_GPU_MEMORY_TIMEOUT_S  # how long that check waits for GPU memory in use
    max_restarts: int = 0
    restart_on: str = "any"  # or "transient", "always"; "any": unless the same failure came twice
    restart_backoff: float = 0.0
    min_uptime: float = 5.0
    max_membership_changes: int = 100
    grow: bool = False  # whether a node that joins later interrupts the attempt
    allow_mismatch: bool = False  # whether differing versions only give a warning
    inspect: bool = True  # whether ranks are inspected before they are stopped
    timeout: float | None = None  # of the whole job, from the first start of ranks
    stall_timeout: float = DEFAULT_STALL_TIMEOUT_S  # without progress, until ``on_stall`` applies
    stall_strict: bool = False  # whether idle ranks that wait for no other rank also count as stalled
    on_stall: str = "report"  # or "stop", "restart"
    straggler_timeout: float | None = None  # how long ranks may run after the others have ended
    shared_log: bool = False  # all nodes print into one log: notes to all nodes are printed by node 0 only

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
    def stall_check_interval_s(self) -> float:
        """Seconds between two inspections of ranks that may have stalled."""
        return max(self.stall_timeout / 5, min(1.0, self.stall_timeout / 2))

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
