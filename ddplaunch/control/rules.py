"""The options about the job as a whole: which nodes take part, how long to wait, how often to restart."""

from __future__ import annotations

from ddplaunch.dataclass import dataclass

MIN_INSPECT_GRACE_S = 5.0  # seconds
DEFAULT_STALL_TIMEOUT_S = 300.0  # seconds without --stall-timeout
EARLY_STALL_CHECK_S = 20.0  # seconds of silence after which ranks that wait are looked for
LONG_WAIT = 600.0  # seconds of a wait after which it is announced although ranks print
DEFAULT_GPU_MEMORY_TIMEOUT_S = 30.0  # seconds without --gpu-memory-timeout


@dataclass(frozen=True)
class JobConfig:
    """Node 0's rules are the job's; times in seconds."""

    min_nodes: int = 1
    max_nodes: int = 1  # that may join; the same where the job is not elastic and has no spares
    spares: int = 0  # of these, how many more than the ranks need: they wait to take the place of others
    run_id: str | None = None  # as typed
    token: str | None = None  # what peers must prove to know; None admits every peer with the same run id
    address: str = ""  # node 0's, as typed
    address_may_be_unknown: bool = False  # whether it is a name that may not be known yet
    port: int | None = None  # node 0's control port; None if the nodes are not connected
    interface: str | None = None  # to use here; None is that of the route to node 0
    join_timeout: float = 600.0
    join_window: float = 30.0  # how long an elastic job that could start waits for more nodes
    heartbeat_timeout: float = 15.0  # silence after which a node counts as lost
    grace: float = 30.0  # what ranks have between SIGTERM and SIGKILL
    preempt_grace: float = 90.0  # what they have between the scheduler's warning and SIGTERM
    checks_nodes: bool = False  # whether every node looks at itself before each attempt
    gpu_memory_timeout: float = DEFAULT_GPU_MEMORY_TIMEOUT_S  # how long that waits for GPU memory that is in use
    max_restarts: int = 0
    restart_on: str = "any"  # failure but one that came twice in the same way; or "transient" ones, or "always"
    restart_backoff: float = 0.0
    min_uptime: float = 5.0
    max_membership_changes: int = 100
    grow: bool = False  # whether a node that comes later interrupts the attempt
    allow_mismatch: bool = False  # whether differing versions only give a warning
    inspect: bool = True  # whether ranks are inspected before they are stopped
    timeout: float | None = None  # of the whole job, from its first start on
    stall_timeout: float = (
        DEFAULT_STALL_TIMEOUT_S  # how long nothing may happen until people hear of it, or what ``on_stall`` says
    )
    stall_strict: bool = False  # whether a job counts as stalled, too, whose ranks are idle and wait for nobody
    on_stall: str = "report"  # or "stop" or "restart"
    straggler_timeout: float | None = None  # how long ranks may run on after the others have ended
    shared_log: bool = False  # whether all nodes print into one log, in which node 0 alone writes what concerns all

    @property
    def is_elastic(self) -> bool:
        return self.min_nodes < self.max_nodes

    @property
    def is_multi_node(self) -> bool:
        """Whether people need to be told which node is meant."""
        return self.max_nodes > 1

    @property
    def inspects_before_stop(self) -> bool:
        """Whether ranks are inspected before they are stopped: with a short grace they have no time for it."""
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
        """As it is typed: "4", "2:4" or "4 --spares 2"."""
        most = self.max_active_nodes
        nodes = f"{self.min_nodes}:{most}" if self.min_nodes < most else str(most)
        return f"{nodes} --spares {self.spares}" if self.spares else nodes
