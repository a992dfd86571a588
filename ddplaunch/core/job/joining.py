"""Waiting for nodes: until they have joined, and until the last ones have finished; and the messages meanwhile."""

from __future__ import annotations

from typing import Literal

from ddplaunch.base.text import MAX_LISTED_NAMES, join_names
from ddplaunch.core.job.job_events import Turn
from ddplaunch.core.job.node_table import NodePhase, NodeTable
from ddplaunch.core.messages import JoinStatus, NoteMessage
from ddplaunch.core.options import Connections, Elastic

STATUS_INTERVAL_S = 0.25
"""Between two JoinStatus messages: many nodes join at once, and each gets every message."""

FIRST_NOTICE_S = 1.0  # after a node has finished, until it prints which nodes it waits for
NOTICE_INTERVAL_S = 30.0  # until it prints that again, if it waits for other nodes by then
REPORT_TIMEOUT_S = 30.0  # beyond the grace, for a node's AttemptReport: twice what unkillable processes take
REPORT_STEP_S = 5.0


class Joining:
    """Waits until enough nodes have joined; an elastic job then waits --join-window for more."""

    def __init__(self, nodes: NodeTable, kind: Literal["node", "task"]) -> None:
        self._config, self._nodes, self._kind, self._turn = nodes.config, nodes, kind, nodes.turn
        self._options = nodes.config.options
        self._window_end: float | None = None

    def begin(self) -> None:
        self._turn.set_deadline("join timeout", self._options[Connections].join_timeout)

    def is_complete(self) -> bool:
        """Return whether all nodes have joined; called whenever one has joined or left."""
        if len(self._nodes) == self._config.max_nodes:
            return True
        if len(self._nodes) < self._config.min_nodes:
            self._window_end = None
            self._turn.deadlines.cancel("join window")
        elif self._window_end is None:
            self._window_end = self._turn.now.mono + self._options[Elastic].join_window
            self._turn.deadlines.set("join window", self._window_end)
        if "join status" not in self._turn.deadlines:
            self._turn.set_deadline("join status", STATUS_INTERVAL_S if len(self._nodes) > 1 else 0)
        return False

    def _build_status(self, window: float | None) -> JoinStatus:
        min_nodes, max_nodes = self._config.min_nodes, self._config.max_nodes
        missing = [number for number in range(max_nodes) if number not in self._nodes]
        return JoinStatus(len(self._nodes), min_nodes, max_nodes, tuple(missing[:MAX_LISTED_NAMES]), window, self._kind)

    def send_status(self) -> None:
        """Send all nodes which of them have joined: the deadline "join status"."""
        left = None if self._window_end is None else max(0.0, self._window_end - self._turn.now.mono)
        self._nodes.broadcast(self._build_status(left))

    def on_timeout(self) -> str | None:
        """Return why the job cannot start: the deadline "join timeout"; None while the join window is open."""
        if len(self._nodes) < self._config.min_nodes:
            return self._describe_missing()
        self._turn.set_deadline("join timeout", self._options[Connections].join_timeout)  # a node may leave meanwhile
        return None

    def _describe_missing(self) -> str:
        """Which nodes did not join in time: why the job never started."""
        status = self._build_status(None)
        min_nodes = f"{'at least ' * (status.min_nodes < status.max_nodes)}{status.min_nodes}"
        absent = status.max_nodes - status.joined
        timeout_s = self._options[Connections].join_timeout
        came = f"{status.joined} of {min_nodes} {self._kind}s joined in {timeout_s:g} s (--join-timeout)"
        here = f"node 0, which is this machine ({self._config.address})" if self._config.address else "node 0"
        hint = f"does the same command run there, and can it reach port {self._config.port} of {here}?"
        return (
            f"only {came}: {self._kind} {status.describe_missing()} {'is' if absent == 1 else 'are'} missing\n  {hint}"
        )


class SlowNodeNotices:
    """Prints, on nodes that have finished, which nodes they still wait for."""

    def __init__(self, nodes: NodeTable, kind: str) -> None:
        """``kind``: "node" or "task"."""
        self._nodes, self._kind, self._turn = nodes, kind, nodes.turn
        self._attempt = -1

    def on_node_finished(self, attempt: int) -> None:
        """Called when all ranks of a node have ended with 0, and those of others still run."""
        if attempt != self._attempt:
            self._attempt = attempt
            self._turn.set_deadline("wait notice", FIRST_NOTICE_S)

    def send(self) -> None:
        """Send the note to all finished nodes that have not got the same one: the deadline "wait notice"."""
        unfinished = [node.name for node in self._nodes.sorted_nodes if node.phase is NodePhase.RUNNING]
        if not unfinished:
            return
        text = f"the ranks of this {self._kind} are done; waiting for {join_names(unfinished)}"
        for number, node in self._nodes.items():
            if node.phase in (NodePhase.FINISHED, NodePhase.DRAINED) and node.last_wait_note != text:
                node.last_wait_note = text
                self._nodes.send(number, NoteMessage(text))
        self._turn.set_deadline("wait notice", NOTICE_INTERVAL_S)


class ReportTimeout:
    """Limits how long nodes may take to report the end of their ranks, despite their heartbeats.

    It counts in steps, so that a suspension of this process adds no more than one step.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._limit_s = 0.0
        self._left_s = 0.0  # after the present step
        self._step_end = 0.0

    def begin(self, grace_s: float) -> None:
        """Called when ranks have this long to end; of several limits, the one that expires first counts."""
        limit_s, left_s = grace_s + REPORT_TIMEOUT_S, self._left_s + self._step_end - self._turn.now.mono
        if "report step" not in self._turn.deadlines or limit_s < left_s:
            self._limit_s = self._left_s = limit_s
            self._begin_step()

    def _begin_step(self) -> None:
        step_s = min(REPORT_STEP_S, self._left_s)
        self._left_s -= step_s
        self._step_end = self._turn.now.mono + step_s
        self._turn.deadlines.set("report step", self._step_end)

    def on_step(self) -> float | None:
        """Return the limit once it has expired: the deadline "report step"."""
        if self._left_s <= 0:
            return self._limit_s
        self._begin_step()
        return None
