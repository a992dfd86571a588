"""Waiting for nodes: until they have joined, and until the last ones have finished; and the messages meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ddplaunch.base.text import MAX_LISTED_NAMES, join_names
from ddplaunch.core.job.node_table import NodePhase, NodeTable
from ddplaunch.core.messages import JoinStatus, NoteMessage

STATUS_INTERVAL_S = 0.25
"""Between two JoinStatus messages: many nodes join at once, and each gets every message."""

FIRST_NOTICE_S = 1.0  # after a node has finished, until it prints which nodes it waits for
NOTICE_INTERVAL_S = 30.0  # until it prints that again, if it waits for other nodes by then


class Joining:
    """Waits until enough nodes have joined; an elastic job then waits --join-window for more."""

    def __init__(
        self,
        nodes: NodeTable,
        kind: Literal["node", "task"],
        call_later: Callable[[float, Callable[[], None]], None],
        clock: Callable[[], float],
        on_ready: Callable[[], None],
        on_timeout: Callable[[str], None],
    ) -> None:
        """``on_timeout`` gets the reason; the timers of ``call_later`` are cancelled when the wait ends."""
        self._config, self._nodes, self._kind = nodes.config, nodes, kind
        self._call_later, self._clock = call_later, clock
        self._start, self._on_timeout = on_ready, on_timeout
        self._window_end: float | None = None
        self._status_due = False

    def start(self) -> None:
        self._call_later(self._config.join_timeout, self._on_join_timeout)
        self.check()

    def check(self) -> None:
        """Start if all nodes have joined; called whenever one has joined or left."""
        if len(self._nodes) == self._config.max_nodes:
            return self._start()
        if len(self._nodes) < self._config.min_nodes:
            self._window_end = None
        elif self._window_end is None:
            self._window_end = self._clock() + self._config.join_window
            self._call_later(self._config.join_window, self._on_join_window_closed)
        if not self._status_due:
            self._status_due = True
            self._call_later(STATUS_INTERVAL_S if len(self._nodes) > 1 else 0, self._send_status)

    def _build_status(self, window: float | None) -> JoinStatus:
        min_nodes, max_nodes = self._config.min_nodes, self._config.max_nodes
        missing = [number for number in range(max_nodes) if number not in self._nodes]
        return JoinStatus(len(self._nodes), min_nodes, max_nodes, tuple(missing[:MAX_LISTED_NAMES]), window, self._kind)

    def _send_status(self) -> None:
        self._status_due = False
        self._nodes.broadcast(
            self._build_status(None if self._window_end is None else max(0.0, self._window_end - self._clock()))
        )

    def _on_join_window_closed(self) -> None:
        if self._window_end is not None and self._clock() >= self._window_end:
            self._start()

    def _on_join_timeout(self) -> None:
        if len(self._nodes) < self._config.min_nodes:
            return self._on_timeout(self._describe_missing())
        # the join window is open; a node may leave meanwhile
        self._call_later(self._config.join_timeout, self._on_join_timeout)

    def _describe_missing(self) -> str:
        """Which nodes did not join in time: why the job never started."""
        status = self._build_status(None)
        min_nodes = f"{'at least ' * (status.min_nodes < status.max_nodes)}{status.min_nodes}"
        absent = status.max_nodes - status.joined
        came = (
            f"{status.joined} of {min_nodes} {self._kind}s joined in {self._config.join_timeout:g} s (--join-timeout)"
        )
        hint = f"does the same command run there, and can it reach port {self._config.port} of node 0?"
        return f"only {came}: {self._kind} {_format_missing(status)} {'is' if absent == 1 else 'are'} missing\n  {hint}"


def _format_missing(status: JoinStatus) -> str:
    unnamed = status.max_nodes - status.joined - len(status.missing)
    return ", ".join(map(str, status.missing)) + (f" and {unnamed} more" if unnamed > 0 else "")


def format_join_status(status: JoinStatus) -> str:
    """Describe who has joined, without the elapsed time: "2/4 nodes joined, waiting for node 2, 3"."""
    count = f"{status.joined}/{status.max_nodes}"
    if status.min_nodes < status.max_nodes:
        count = f"{status.joined} of {status.min_nodes} to {status.max_nodes}"
    joined, missing = f"{count} {status.kind}s joined", f"{status.kind} {_format_missing(status)}"
    if status.window_s is not None:
        return f"{joined}, starting in {status.window_s:.0f} s unless {missing} joins first"
    return f"{joined}, waiting for {missing}"


class SlowNodeNotices:
    """Prints, on nodes that have finished, which nodes they still wait for."""

    def __init__(
        self,
        nodes: NodeTable,
        kind: str,
        call_later: Callable[[float, Callable[[], None]], None],
        is_running: Callable[[], bool],
    ) -> None:
        """``kind``: "node" or "task"; ``is_running``: whether ranks run.

        The timers of ``call_later`` are cancelled when an attempt starts or ends.
        """
        self._nodes, self._kind, self._call_later, self._is_running = nodes, kind, call_later, is_running
        self._attempt = -1

    def on_node_finished(self, attempt: int) -> None:
        """Called when all ranks of a node have ended with 0, and those of others still run."""
        if attempt != self._attempt:
            self._attempt = attempt
            self._call_later(FIRST_NOTICE_S, self._send_notice)

    def _send_notice(self) -> None:
        """Send the note to all finished nodes that have not got the same one; again after NOTICE_INTERVAL_S."""
        unfinished = [node.name for node in self._nodes.sorted_nodes if node.phase is NodePhase.RUNNING]
        if not self._is_running() or not unfinished:
            return
        text = f"the ranks of this {self._kind} are done; waiting for {join_names(unfinished)}"
        for number, node in list(self._nodes.items()):
            if node.phase in (NodePhase.FINISHED, NodePhase.DRAINED) and node.last_wait_note != text:
                node.last_wait_note = text
                self._nodes.send(number, NoteMessage(text))
        self._call_later(NOTICE_INTERVAL_S, self._send_notice)
