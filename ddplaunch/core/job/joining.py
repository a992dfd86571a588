"""Waits until the nodes have joined, and at the end until the last have finished; tells the nodes about the waits."""

from __future__ import annotations

from typing import Literal

from ddplaunch.base.text import MAX_LISTED_NAMES, join_names
from ddplaunch.core.deadlines import Deadline, Deadlines, Now
from ddplaunch.core.job.job_deadlines import (
    JoinStatusDue,
    JoinTimeoutOver,
    JoinWindowOver,
    ReportIntervalOver,
    WaitNoticeDue,
)
from ddplaunch.core.job.node_table import NodePhase, NodeTable
from ddplaunch.core.machine import Command, Send
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

    def __init__(self, nodes: NodeTable, deadlines: Deadlines[Deadline], kind: Literal["node", "task"]) -> None:
        self._config, self._nodes, self._kind, self._deadlines = nodes.config, nodes, kind, deadlines
        self._options = nodes.config.options
        self._window_end: float | None = None

    def begin(self, now: Now) -> None:
        self._deadlines.set(JoinTimeoutOver(), now.mono + self._options[Connections].join_timeout)

    def is_complete(self, now: Now) -> bool:
        """Return whether all nodes have joined; called whenever one has joined or left."""
        if len(self._nodes) == self._config.max_nodes:
            return True
        if len(self._nodes) < self._config.min_nodes:
            self._window_end = None
            self._deadlines.cancel(JoinWindowOver())
        elif self._window_end is None:
            self._window_end = now.mono + self._options[Elastic].join_window
            self._deadlines.set(JoinWindowOver(), self._window_end)
        if JoinStatusDue() not in self._deadlines:
            self._deadlines.set(JoinStatusDue(), now.mono + (STATUS_INTERVAL_S if len(self._nodes) > 1 else 0))
        return False

    def _build_status(self, window: float | None) -> JoinStatus:
        min_nodes, max_nodes = self._config.min_nodes, self._config.max_nodes
        missing = [number for number in range(max_nodes) if number not in self._nodes]
        return JoinStatus(len(self._nodes), min_nodes, max_nodes, tuple(missing[:MAX_LISTED_NAMES]), window, self._kind)

    def send_status(self, now: Now) -> list[Command]:
        """Handle ``JoinStatusDue``: send all nodes the list of the nodes that have joined."""
        left = None if self._window_end is None else max(0.0, self._window_end - now.mono)
        return self._nodes.to_all(self._build_status(left))

    def on_timeout(self, now: Now) -> str | None:
        """Handle ``JoinTimeoutOver``: return why the job cannot start; None if enough nodes have joined."""
        if len(self._nodes) < self._config.min_nodes:
            return self._describe_missing()
        self.begin(now)  # a node may leave meanwhile
        return None

    def _describe_missing(self) -> str:
        """Return the message that the job cannot start, with the nodes that have not joined in time."""
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

    def __init__(self, nodes: NodeTable, deadlines: Deadlines[Deadline], kind: str) -> None:
        """``kind``: "node" or "task"."""
        self._nodes, self._kind, self._deadlines = nodes, kind, deadlines
        self._attempt = -1

    def on_node_finished(self, attempt: int, now: Now) -> None:
        """Called when all ranks of a node have ended with 0, and those of others still run."""
        if attempt != self._attempt:
            self._attempt = attempt
            self._deadlines.set(WaitNoticeDue(), now.mono + FIRST_NOTICE_S)

    def send(self, now: Now) -> list[Command]:
        """Handle ``WaitNoticeDue``: send the note to all finished nodes that have not got the same note before."""
        unfinished = [node.name for node in self._nodes.sorted_nodes if node.phase is NodePhase.RUNNING]
        commands: list[Command] = []
        if not unfinished:
            return commands
        text = f"the ranks of this {self._kind} are done; waiting for {join_names(unfinished)}"
        for number, node in self._nodes.items():
            if node.phase in (NodePhase.FINISHED, NodePhase.DRAINED) and node.last_wait_note != text:
                node.last_wait_note = text
                commands.append(Send(number, NoteMessage(text)))
        self._deadlines.set(WaitNoticeDue(), now.mono + NOTICE_INTERVAL_S)
        return commands


class ReportTimeout:
    """Limits how long nodes may take to report the end of their ranks, even if their heartbeats arrive.

    It counts in steps, so that a suspension of this process adds no more than one step.
    """

    def __init__(self, deadlines: Deadlines[Deadline]) -> None:
        self._deadlines = deadlines
        self._limit_s = 0.0
        self._left_s = 0.0  # after the present step
        self._step_end = 0.0

    def begin(self, grace_s: float, now: Now) -> None:
        """Start the wait for reports when ranks have ``grace_s`` to end; of several limits, the earliest counts."""
        limit_s, left_s = grace_s + REPORT_TIMEOUT_S, self._left_s + self._step_end - now.mono
        if ReportIntervalOver() not in self._deadlines or limit_s < left_s:
            self._limit_s = self._left_s = limit_s
            self._begin_interval(now)

    def _begin_interval(self, now: Now) -> None:
        step_s = min(REPORT_STEP_S, self._left_s)
        self._left_s -= step_s
        self._step_end = now.mono + step_s
        self._deadlines.set(ReportIntervalOver(), self._step_end)

    def on_interval_over(self, now: Now) -> float | None:
        """Handle ``ReportIntervalOver``: return the limit if it has expired, else None."""
        if self._left_s <= 0:
            return self._limit_s
        self._begin_interval(now)
        return None
