"""The options about the job as a whole: which nodes take part, how long to wait, how often to restart."""

from __future__ import annotations

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from ddplaunch.plan.plan import Plan

MIN_GRACE = 5.0  # seconds
STALLED = 300.0  # seconds without --stall-timeout
GPU_MEMORY = 30.0  # seconds without --gpu-memory-timeout


@dataclass(frozen=True)
class Rules:
    """Node 0's rules are the job's; times in seconds."""

    min_nodes: int = 1
    max_nodes: int = 1  # that may join; the same where the job is not elastic and has no spares
    spares: int = 0  # of these, how many more than the ranks need: they wait to take the place of others
    run_id: str | None = None  # as typed
    token: str | None = None  # what peers must prove to know; None admits every peer with the same run id
    address: str = ""  # node 0's, as typed
    address_comes_late: bool = False  # whether it is a name that may not be known yet
    port: int | None = None  # node 0's control port; None if the nodes are not connected
    interface: str | None = None  # to use here; None is that of the route to node 0
    join_timeout: float = 600.0
    join_window: float = 30.0  # how long an elastic job that could start waits for more nodes
    heartbeat_timeout: float = 15.0  # silence after which a node counts as lost
    grace: float = 30.0  # what ranks have between SIGTERM and SIGKILL
    preempt_grace: float = 90.0  # what they have between the scheduler's warning and SIGTERM
    checks: bool = False  # whether every node looks at itself before each attempt
    gpu_memory_timeout: float = GPU_MEMORY  # how long that waits for GPU memory that is in use
    max_restarts: int = 0
    restart_on: str = "any"  # failure but one that came twice in the same way; or "transient" ones, or "always"
    restart_backoff: float = 0.0
    min_uptime: float = 5.0
    max_membership_changes: int = 100
    grow: bool = False  # whether a node that comes later interrupts the attempt
    allow_mismatch: bool = False  # whether differing versions only give a warning
    inspect: bool = True  # whether ranks are inspected before they are stopped
    timeout: float | None = None  # of the whole job, from its first start on
    stall_timeout: float = STALLED  # how long nothing may happen until people hear of it, or what ``on_stall`` says
    stall_strict: bool = False  # whether a job counts as stalled, too, whose ranks are idle and wait for nobody
    on_stall: str = "report"  # or "stop" or "restart"
    straggler_timeout: float | None = None  # how long ranks may run on after the others have ended
    one_log: bool = False  # whether all nodes print into one log, in which node 0 alone writes what concerns all

    @property
    def elastic(self) -> bool:
        return self.min_nodes < self.max_nodes

    @property
    def several(self) -> bool:
        """Whether people need to be told which node is meant."""
        return self.max_nodes > 1

    @property
    def inspects(self) -> bool:
        """Whether ranks are inspected before they are stopped: with a short grace they have no time for it."""
        return self.inspect and self.grace >= MIN_GRACE

    @property
    def stall_pause(self) -> float:
        """Seconds between two inspections of ranks that may have stalled."""
        return max(self.stall_timeout / 5, min(1.0, self.stall_timeout / 2))

    @property
    def most_nodes(self) -> int:
        """How many nodes have ranks at most."""
        return self.max_nodes - self.spares

    @property
    def nnodes(self) -> str:
        """As it is typed: "4", "2:4" or "4 --spares 2"."""
        most = self.most_nodes
        nodes = f"{self.min_nodes}:{most}" if self.min_nodes < most else str(most)
        return f"{nodes} --spares {self.spares}" if self.spares else nodes

    def check(self, plan: Plan) -> None:
        """Raise a UsageError where this node lacks what it needs for its share, or these rules contradict the plan."""
        if self.interface:
            from ddplaunch.control.route import check_interface

            check_interface(self.interface)
        if plan.nnodes > 1:
            if self.port is None:
                _check_alone(plan)
            else:
                _check_joining(self, plan)


def _check_alone(plan: Plan) -> None:
    if plan.missing:
        *first, last = plan.missing
        names = f"{', '.join(first)} and {last}" if first else last
        raise UsageError(
            f"--control none on {plan.nnodes} nodes needs {names}",
            "ddplaunch run … --dry-run writes the command for each node",
        )
    if plan.max_restarts:
        raise UsageError(
            f"--max-restarts {plan.max_restarts} does not work with --control none: each node would restart alone",
            "leave one of them out",
        )


def _check_joining(rules: Rules, plan: Plan) -> None:
    others = f"1 to {plan.nnodes - 1}" if plan.nnodes > 2 else "1"
    if "--node-rank" in plan.missing:
        rest = f"{others} on the other{'s' * (plan.nnodes > 2)}"
        raise UsageError(
            f"--node-rank is missing: which of the {plan.nnodes} nodes is this?",
            f"--node-rank 0 on the node whose address is --master-addr, {rest}\n"
            "--node-rank auto numbers them as they join",
        )
    from ddplaunch.control.route import check_is_ours, own_addresses

    if "--master-addr" in plan.missing:
        if plan.node_rank:
            raise UsageError(
                f"--master-addr is missing: where is node 0 of these {plan.nnodes} nodes?",
                "`hostname -I` on node 0 shows its addresses; give the same one on every node",
            )
        example = next(own_addresses(), "10.0.0.1")
        raise UsageError(
            "--master-addr is missing: where do the other nodes reach this one?",
            f"--master-addr {example} on every node; it is an address of this machine",
        )
    if plan.node_rank == 0 and plan.numbered and not rules.address_comes_late:
        check_is_ours(plan.master_addr)
