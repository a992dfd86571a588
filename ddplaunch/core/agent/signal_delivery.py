"""Delivers signals for the program to this node's ranks: to each rank as soon as it has a handler.

A scheduler's warning or a user's ``kill -USR1`` may come while torch is imported. The signal would end a rank without a
handler, so that rank gets the signal later. In many programs only rank 0 sets a handler: once a rank has got the
signal, ranks without a handler can get it for a minute more. A handler that is set later is for something else.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from ddplaunch.base.event_loop import EventLoop, Timer
from ddplaunch.base.text import signal_name
from ddplaunch.core.agent.node_ranks import NodeRanks

_CHECK_INTERVAL_S = 0.2  # reading the handlers of a rank takes 20 µs
_SLOW_CHECK_INTERVAL_S = 2.0  # after a minute
_OTHERS_TIMEOUT_S = 60.0  # for ranks without a handler, after the first rank has got the signal
_NOTE_DELAY_S = 30.0
_NOT_KEPT = (signal.SIGWINCH, signal.SIGCONT)  # of a terminal, and without effect by default


class _PendingSignal:
    """A signal that has not reached all ranks yet."""

    def __init__(self, now: float, *, is_noted: bool) -> None:
        self.arrived_at, self.first_delivered_at = now, 0.0
        self.pids: set[int] = set()  # of the ranks that have got it
        self.is_noted = is_noted  # a message has named the signal, or no message shall


class SignalDelivery:
    """Keeps signals for the ranks of a node until every rank has got them, through all attempts."""

    def __init__(self, loop: EventLoop, note: Callable[[str], None]) -> None:
        self._loop, self._note = loop, note
        self._pending: dict[int, _PendingSignal] = {}  # by number: two of the same kind are one, as in the kernel
        self._timer: Timer | None = None
        self._ranks: NodeRanks | None = None

    def send(self, number: int, ranks: NodeRanks, *, names_unhandled: bool) -> None:
        """Send a signal to all ranks with a handler for it, and to each other rank once it has one.

        ``names_unhandled``: show a message if none does.
        """
        self._ranks = ranks
        if number in _NOT_KEPT:
            ranks.forward_signal(number, only_handlers=True)
            return
        self._pending[number] = _PendingSignal(time.monotonic(), is_noted=not names_unhandled)
        self._deliver()

    def on_attempt_start(self, ranks: NodeRanks) -> None:
        """Keep the signals that no rank of an earlier attempt has got, for the ranks of this attempt."""
        self._ranks = ranks
        self._pending = {number: each for number, each in self._pending.items() if not each.pids}

    def close(self) -> None:
        """Called when the job has ended: show a message with the signals that could not be delivered to any rank."""
        if self._timer is not None:
            self._timer.cancel()
        for number, pending in self._pending.items():
            if not (pending.pids or pending.is_noted):
                self._note(f"{signal_name(number)}: no rank handled it")
        self._pending.clear()

    def _deliver(self) -> None:
        now, ranks = time.monotonic(), self._ranks
        for number, pending in list(self._pending.items()):
            if ranks is not None:
                pending.pids |= ranks.forward_signal(number, only_handlers=True, except_pids=pending.pids)
            if pending.pids and not pending.first_delivered_at:
                pending.first_delivered_at = now
            if pending.pids and (
                now - pending.first_delivered_at > _OTHERS_TIMEOUT_S or self._is_delivered_to_all(ranks, pending.pids)
            ):
                del self._pending[number]
            elif not (pending.pids or pending.is_noted) and now - pending.arrived_at > _NOTE_DELAY_S:
                pending.is_noted = True
                self._note(f"{signal_name(number)}: no rank handles it yet; a rank gets it once it does")
        if self._timer is not None:
            self._timer.cancel()
        if self._pending:
            oldest = min(each.arrived_at for each in self._pending.values())
            delay_s = _CHECK_INTERVAL_S if now - oldest < _OTHERS_TIMEOUT_S else _SLOW_CHECK_INTERVAL_S
            self._timer = self._loop.call_later(delay_s, self._deliver)

    def _is_delivered_to_all(self, ranks: NodeRanks | None, pids: set[int]) -> bool:
        """Whether all ranks of the attempt have got a signal; ``pids`` are the ranks that have."""
        alive = {process.pid for process in ranks.processes.values()} if ranks else set()
        return ranks is not None and not ranks.attempt.not_spawned and alive <= pids
