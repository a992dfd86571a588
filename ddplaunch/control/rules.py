"""The options about the job as a whole: which nodes take part, how long to wait, how often to restart."""

from __future__ import annotations

from dataclasses import dataclass

MIN_HEARTBEAT = 2.0
"""Seconds below which a busy machine would be taken for a dead one."""


@dataclass(frozen=True)
class Rules:
    """Node 0's rules are the job's; times in seconds.

    Attributes:
        min_nodes, max_nodes: how many nodes the job runs with; equal where it is not elastic.
        run_id: as typed; None if it was not.
        token: what peers must prove to know; None admits every peer with the same run id.
        address: node 0's, as typed. port: its control port; None if the nodes are not connected.
        address_comes_late: whether it is a name that may not be known yet.
        interface: the network interface to use here; None is that of the route to node 0.
        heartbeat_timeout: silence after which a node counts as lost.
        join_window: how long an elastic job that could start waits for more nodes.
        grow: whether a node that comes later interrupts the attempt.
        grace: what ranks have between SIGTERM and SIGKILL.
        preempt_grace: what they have between the scheduler's warning and SIGTERM.
        allow_mismatch: whether differing versions only give a warning.
        one_log: whether all nodes print into one log, in which node 0 alone writes what concerns the whole job.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    run_id: str | None = None
    token: str | None = None
    address: str = ""
    address_comes_late: bool = False
    port: int | None = None
    interface: str | None = None
    join_timeout: float = 600.0
    join_window: float = 30.0
    heartbeat_timeout: float = 15.0
    grace: float = 30.0
    preempt_grace: float = 90.0
    max_restarts: int = 0
    restart_backoff: float = 0.0
    min_uptime: float = 5.0
    max_membership_changes: int = 100
    grow: bool = False
    allow_mismatch: bool = False
    one_log: bool = False

    @property
    def elastic(self) -> bool:
        return self.min_nodes < self.max_nodes

    @property
    def nnodes(self) -> str:
        """As ``--nnodes`` has it: "4" or "2:4"."""
        return f"{self.min_nodes}:{self.max_nodes}" if self.elastic else str(self.max_nodes)
