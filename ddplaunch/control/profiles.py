"""The profile of all ranks that node 0 has every node take at once: each rank's goes on to who asked as it comes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ddplaunch.control.messages import ProfileReply, ProfileRequest
from ddplaunch.control.seat import NodeTable
from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.loop import Timer
from ddplaunch.wire.frames import ProtocolError

REPLY_MARGIN_S = 9.0  # seconds, beyond those of the profile, for a node to answer
BUSY_ERROR = "another profile of this job is being taken"


@dataclass
class _PendingProfile:
    requesting_node: int  # the node that asked
    request_serial: int  # its number for that
    serial: int
    timer: Timer
    waiting_for: set[int]  # the nodes that have more to say
    reported_ranks: set[int] = field(default_factory=set)  # the ranks that have come


class JobProfiles:
    """One at a time."""

    def __init__(self, seats: NodeTable, call_later: Callable[[float, Callable[[], None]], Timer]) -> None:
        """``call_later`` is the loop's."""
        self._seats, self._after = seats, call_later
        self._open: _PendingProfile | None = None
        self._serial = 0

    def on_message(self, number: int, message: ProfileRequest | ProfileReply) -> None:
        """Take in a node's question, or an answer; Garbled where it speaks of ranks that are not its own."""
        if isinstance(message, ProfileReply):
            self._on_reply(number, message)
        elif self._open is not None:
            self._seats.tell(number, ProfileReply(message.serial, is_last=True, refusal=BUSY_ERROR))
        else:
            self._start(number, message)

    def _start(self, number: int, message: ProfileRequest) -> None:
        self._serial += 1
        serial = self._serial
        awaited = {seat.node_rank for seat in self._seats.values() if seat.has_ranks}
        timer = self._after(message.seconds + REPLY_MARGIN_S, partial(self._close, serial))
        self._open = _PendingProfile(number, message.serial, serial, timer, awaited)
        for each in sorted(awaited):
            self._seats.tell(each, replace(message, serial=serial))
        self._close_if_complete(serial)

    def _on_reply(self, number: int, message: ProfileReply) -> None:
        found = self._open
        if found is None or message.serial != found.serial or number not in found.waiting_for:
            return
        if message.profile:
            rank = message.profile.rank
            if number and (rank not in self._seats[number].ranks or rank in found.reported_ranks):
                raise ProtocolError("the profile of a rank that is not its own, or again")
            found.reported_ranks.add(rank)
            self._seats.tell(found.requesting_node, ProfileReply(found.request_serial, message.profile))
        if message.is_last:
            found.waiting_for.discard(number)
            self._close_if_complete(found.serial)

    def on_node_lost(self, number: int) -> None:
        """This node is lost; what it would have told is not waited for."""
        if self._open is not None:
            self._open.waiting_for.discard(number)
            self._after(0, partial(self._close_if_complete, self._open.serial))

    def _close_if_complete(self, serial: int) -> None:
        if self._open is not None and not self._open.waiting_for:
            self._close(serial)

    def _close(self, serial: int) -> None:
        found = self._open
        if found is None or found.serial != serial:
            return
        self._open = None
        found.timer.cancel()
        silent = tuple(self._seats[number].name for number in sorted(found.waiting_for) if number in self._seats)
        self._seats.tell(found.requesting_node, ProfileReply(found.request_serial, is_last=True, silent_nodes=silent))
