"""Profiles of the whole job: node 0 has all nodes profile their ranks, and forwards each rank's profile at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from ddplaunch.base.event_loop import Timer
from ddplaunch.base.frames import ProtocolError
from ddplaunch.core.job.node_table import NodeTable
from ddplaunch.core.messages import ProfileReply, ProfileRequest

REPLY_MARGIN_S = 9.0  # beyond the duration of the profile, for a node's reply
BUSY_ERROR = "another profile of this job is being taken"


class _PendingProfile(Struct):
    requesting_node: int  # gets the replies
    request_serial: int  # the serial of its request
    serial: int
    timer: Timer
    waiting_for: set[int]  # nodes without a last reply
    reported_ranks: set[int] = field(default_factory=set)  # ranks whose profile was forwarded


class JobProfiles:
    """Takes one profile at a time."""

    def __init__(self, nodes: NodeTable, call_later: Callable[[float, Callable[[], None]], Timer]) -> None:
        """``call_later`` is the loop's."""
        self._nodes, self._call_later = nodes, call_later
        self._pending: _PendingProfile | None = None
        self._serial = 0

    def on_message(self, number: int, message: ProfileRequest | ProfileReply) -> None:
        """Handle a request or a reply of a node; ProtocolError if a reply has a rank of another node."""
        if isinstance(message, ProfileReply):
            self._on_reply(number, message)
        elif self._pending is not None:
            self._nodes.send(number, ProfileReply(message.serial, is_last=True, refusal=BUSY_ERROR))
        else:
            self._start(number, message)

    def _start(self, number: int, message: ProfileRequest) -> None:
        self._serial += 1
        serial = self._serial
        waiting_for = {node.node_rank for node in self._nodes.values() if node.has_ranks}
        timer = self._call_later(message.seconds + REPLY_MARGIN_S, partial(self._close, serial))
        self._pending = _PendingProfile(number, message.serial, serial, timer, waiting_for)
        for each in sorted(waiting_for):
            self._nodes.send(each, replace(message, serial=serial))
        self._close_if_complete(serial)

    def _on_reply(self, number: int, message: ProfileReply) -> None:
        pending = self._pending
        if pending is None or message.serial != pending.serial or number not in pending.waiting_for:
            return
        if message.profile:
            rank = message.profile.rank
            if number and (rank not in self._nodes[number].ranks or rank in pending.reported_ranks):
                raise ProtocolError("the profile of a rank that is not its own, or again")
            pending.reported_ranks.add(rank)
            self._nodes.send(pending.requesting_node, ProfileReply(pending.request_serial, message.profile))
        if message.is_last:
            pending.waiting_for.discard(number)
            self._close_if_complete(pending.serial)

    def on_node_lost(self, number: int) -> None:
        """Called when a node is lost: stop waiting for it."""
        if self._pending is not None:
            self._pending.waiting_for.discard(number)
            self._call_later(0, partial(self._close_if_complete, self._pending.serial))

    def _close_if_complete(self, serial: int) -> None:
        if self._pending is not None and not self._pending.waiting_for:
            self._close(serial)

    def _close(self, serial: int) -> None:
        pending = self._pending
        if pending is None or pending.serial != serial:
            return
        self._pending = None
        pending.timer.cancel()
        silent = tuple(self._nodes[number].name for number in sorted(pending.waiting_for) if number in self._nodes)
        self._nodes.send(
            pending.requesting_node, ProfileReply(pending.request_serial, is_last=True, silent_nodes=silent)
        )
