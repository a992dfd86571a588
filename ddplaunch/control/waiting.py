"""The waits for nodes, until they have joined and until the last of them have finished: what people read meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch import TYPE_CHECKING
from ddplaunch.control.messages import JoinStatus, NoteMessage
from ddplaunch.control.seat import NodePhase, NodeTable
from ddplaunch.words import MAX_LISTED_NAMES, join_names

if TYPE_CHECKING:
    from typing import Literal

STATUS_INTERVAL_S = 0.25
"""Seconds between two messages on who has joined: many nodes join at once, and each gets every message."""

FIRST_NOTICE_S = 1.0  # seconds after which a node that has finished says which nodes it waits for
NOTICE_INTERVAL_S = 30.0  # seconds after which it says so again, if it waits for others by then


class Joining:
    """Waits until the job can start; an elastic job that could start gives late nodes some time."""

    def __init__(
        self,
        seats: NodeTable,
        kind: Literal["node", "task"],
        call_later: Callable[[float, Callable[[], None]], None],
        clock: Callable[[], float],
        on_ready: Callable[[], None],
        on_timeout: Callable[[str], None],
    ) -> None:
        """What is called ``call_later`` a time is cancelled at the end of the wait; ``on_timeout`` gets the reason."""
        self._rules, self._seats, self._kind = seats.rules, seats, kind
        self._after, self._clock = call_later, clock
        self._start, self._give_up = on_ready, on_timeout
        self._window: float | None = None
        self._status_due = False

    def start(self) -> None:
        self._after(self._rules.join_timeout, self._on_join_timeout)
        self.check()

    def check(self) -> None:
        """Start if all nodes have joined; to be called whenever one has come or gone."""
        if len(self._seats) == self._rules.max_nodes:
            return self._start()
        if len(self._seats) < self._rules.min_nodes:
            self._window = None
        elif self._window is None:
            self._window = self._clock() + self._rules.join_window
            self._after(self._rules.join_window, self._on_join_window_closed)
        if not self._status_due:
            self._status_due = True
            self._after(STATUS_INTERVAL_S if len(self._seats) > 1 else 0, self._send_status)

    def _build_status(self, window: float | None) -> JoinStatus:
        least, most = self._rules.min_nodes, self._rules.max_nodes
        missing = [number for number in range(most) if number not in self._seats]
        return JoinStatus(len(self._seats), least, most, tuple(missing[:MAX_LISTED_NAMES]), window, self._kind)

    def _send_status(self) -> None:
        self._status_due = False
        self._seats.broadcast(
            self._build_status(None if self._window is None else max(0.0, self._window - self._clock()))
        )

    def _on_join_window_closed(self) -> None:
        if self._window is not None and self._clock() >= self._window:
            self._start()

    def _on_join_timeout(self) -> None:
        if len(self._seats) < self._rules.min_nodes:
            return self._give_up(self._describe_missing())
        self._after(self._rules.join_timeout, self._on_join_timeout)  # a node may leave before the window is over

    def _describe_missing(self) -> str:
        """Say who has not come: the last words of a job that never started."""
        status = self._build_status(None)
        least = f"{'at least ' * (status.min_nodes < status.max_nodes)}{status.min_nodes}"
        absent = status.max_nodes - status.joined
        came = f"{status.joined} of {least} {self._kind}s joined in {self._rules.join_timeout:g} s (--join-timeout)"
        hint = f"does the same command run there, and can it reach port {self._rules.port} of node 0?"
        return f"only {came}: {self._kind} {_format_missing(status)} {'is' if absent == 1 else 'are'} missing\n  {hint}"


def _format_missing(status: JoinStatus) -> str:
    unnamed = status.max_nodes - status.joined - len(status.missing)
    return ", ".join(map(str, status.missing)) + (f" and {unnamed} more" if unnamed > 0 else "")


def format_join_status(status: JoinStatus) -> str:
    """Say it without the time: "2/4 nodes joined, waiting for node 2, 3"."""
    count = f"{status.joined}/{status.max_nodes}"
    if status.min_nodes < status.max_nodes:
        count = f"{status.joined} of {status.min_nodes} to {status.max_nodes}"
    joined, missing = f"{count} {status.kind}s joined", f"{status.kind} {_format_missing(status)}"
    if status.window_s is not None:
        return f"{joined}, starting in {status.window_s:.0f} s unless {missing} joins first"
    return f"{joined}, waiting for {missing}"


class SlowNodeNotices:
    """Those of one attempt after the other, which the nodes that have finished hear of."""

    def __init__(
        self,
        seats: NodeTable,
        kind: str,
        call_later: Callable[[float, Callable[[], None]], None],
        is_running: Callable[[], bool],
    ) -> None:
        """``kind``: what people call a node; ``call_later`` forgets what an attempt leaves; ``is_running``: whether one is."""
        self._seats, self._kind, self._after, self._running = seats, kind, call_later, is_running
        self._attempt = -1

    def on_node_finished(self, attempt: int) -> None:
        """A node has finished."""
        if attempt != self._attempt:
            self._attempt = attempt
            self._after(FIRST_NOTICE_S, self._send_notice)

    def _send_notice(self) -> None:
        """Tell the nodes that have finished which others they wait for; all of them together, now and then."""
        awaited = [seat.name for seat in self._seats.sorted_nodes if seat.phase is NodePhase.RUNNING]
        if not self._running() or not awaited:
            return
        text = f"the ranks of this {self._kind} are done; waiting for {join_names(awaited)}"
        for number, seat in list(self._seats.items()):
            if seat.phase in (NodePhase.FINISHED, NodePhase.DRAINED) and seat.last_wait_note != text:
                seat.last_wait_note = text
                self._seats.tell(number, NoteMessage(text))
        self._after(NOTICE_INTERVAL_S, self._send_notice)
