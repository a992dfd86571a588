"""Node 0's side of a job: the coordinator, the node in our own process, and the connections of all others."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

from ddplaunch import TYPE_CHECKING
from ddplaunch.control import limits, messages
from ddplaunch.control.clock_offset import OURS, UNKNOWN, ClockOffset, PeerClock
from ddplaunch.control.coordinator import Coordinator
from ddplaunch.control.heartbeat import Heartbeat
from ddplaunch.control.messages import Declined, End, ForRanks, FromNode, Hello, Message, Refused, Start
from ddplaunch.control.pacing import Pacing
from ddplaunch.control.relay import Relay
from ddplaunch.control.route import interface_of
from ddplaunch.control.rules import Rules
from ddplaunch.dataclass import replace
from ddplaunch.loop import Loop
from ddplaunch.wire.frames import Garbled
from ddplaunch.words import named

if TYPE_CHECKING:
    from ddplaunch.wire.connection import Connection

PARTING = 1.0  # seconds in which the others must have read that the job is over


class NodeZero:
    """Coordinates the job from node 0; a job of one node needs no socket for it."""

    def __init__(
        self,
        loop: Loop,
        rules: Rules,
        hello: Hello,
        run_id: str,
        hear: Callable[[Message], None],
        listening: socket.socket | None = None,
    ) -> None:
        """``hear`` is the node in this process; ``listening`` is bound to the control port, where there is one."""
        self._loop = loop
        self._rules = rules
        self._run_id = run_id
        self._hear = hear
        self._listening = listening
        self._peers: dict[int, Connection[Message]] = {}
        self._clocks: dict[int, PeerClock] = {}
        self._leaving: list[Connection[Message]] = []
        self._ranks = len(hello.share.devices)
        self._coordinator = Coordinator(rules, hello, run_id, self._tell, self._drop, loop.after)
        self._relay = Relay()
        self._counted = 0
        self._start: Start | None = None  # the latest
        self._pacing: Pacing | None = None
        self._frame: tuple[Message | None, bytes] = (None, b"")  # of the message that was last sent to a node

    def begin(self) -> None:
        """Wait for the others, or start at once where there are none."""
        if self._listening is not None:
            from ddplaunch.control.listener import Listener

            self._listener = Listener(self._loop, self._listening, self._rules, self._ranks, self._meet)
            self._heartbeat = Heartbeat(self._loop, self._rules.heartbeat_timeout, self._beat, self._silent)
            if text := limits.too_low(self._rules.max_nodes):
                self._hear(messages.Note(text))
        self._coordinator.open()

    def tell(self, message: FromNode) -> None:
        if isinstance(message, messages.Arrived):
            return self._compare(0, message)
        if isinstance(message, ForRanks):
            return self._pass_on(0, message)
        self._coordinator.hear(0, message)

    def close(self) -> None:
        """Part from the others, once they have read how the job ended or had the time to."""
        if self._listening is None:
            return
        self._heartbeat.close()
        self._leaving = [*self._listener.close(), *self._peers.values()]
        for connection in self._peers.values():
            connection.part(PARTING)
        self._peers.clear()

    @property
    def closed(self) -> bool:
        return not any(connection.open for connection in self._leaving)

    def _meet(self, connection: Connection[Message], hello: Hello | Declined, proof: str | None) -> None:
        if isinstance(hello, Declined):
            return self._listener.dismiss(connection, self._coordinator.decline(hello))
        admitted = self._coordinator.admit(hello)
        if isinstance(admitted, Refused):
            return self._listener.dismiss(connection, admitted)
        number = admitted.share.node_rank
        self._peers[number] = connection
        self._clocks[number] = PeerClock()
        connection.expect(messages.FROM_NODE)
        connection.hear = partial(self._heard, number)
        connection.lost = partial(self._lost, number)
        given, late = None if hello.numbered else number, self._start is not None
        connection.send(messages.Joined(self._run_id, self._rules.heartbeat_timeout, proof, given, late))
        self._heartbeat.heard(number)
        self._coordinator.join(admitted)

    def _heard(self, number: int, message: Message) -> None:
        self._heartbeat.heard(number)
        if isinstance(message, messages.Beat):
            return self._clocks[number].hear(message)
        if isinstance(message, messages.Arrived):
            return self._compare(number, message)
        if isinstance(message, ForRanks):
            return self._pass_on(number, message)
        if isinstance(message, messages.Profiled) and message.profile:
            message = replace(message, profile=message.profile.aligned(*self._clock(number)))
        self._coordinator.hear(number, message)  # type: ignore[arg-type]  # the connection accepts nothing else

    def _pass_on(self, number: int, message: ForRanks) -> None:
        """Have the ranks of all nodes get a signal that has come to one."""
        if self._relay.take(number, message.number):
            for node in (0, *self._peers):
                self._tell(node, message)

    def _compare(self, number: int, message: messages.Arrived) -> None:
        """Keep when ranks arrived at collectives, with what is known now of their clock."""
        if (pacing := self._paces()) is None:
            raise Garbled("collectives before the start")
        pacing.hear(number, message, self._offset(number))

    def _paces(self) -> Pacing | None:
        """Those of the latest attempt."""
        if self._pacing is None and self._start is not None:
            self._pacing = Pacing(self._start)
        return self._pacing

    def _judged(self, message: messages.Inspected) -> messages.Inspected:
        """With who is slow in place of when the ranks arrived."""
        if any(rank.arrivals for rank in message.inspection.ranks) and (pacing := self._paces()):
            return replace(message, inspection=pacing.judge(message.inspection, self._offset))
        return message

    def _offset(self, number: int) -> ClockOffset:
        if number == 0:
            return OURS
        return self._clocks[number].offset() if number in self._clocks else UNKNOWN

    def _clock(self, number: int) -> tuple[float, float]:
        offset = self._offset(number)
        return offset.ahead, offset.error

    def _lost(self, number: int, why: str, silence: float = 0.0) -> None:
        self._forget(number)
        self._coordinator.lost(number, why, silence)

    def _drop(self, number: int) -> None:
        self._forget(number).close()

    def _forget(self, number: int) -> Connection[Message]:
        self._heartbeat.forget(number)
        del self._clocks[number]
        return self._peers.pop(number)

    def _silent(self, number: int, seconds: float) -> None:
        self._peers[number].close()
        self._lost(number, f"nothing was heard of it for {seconds:.1f} s", seconds)

    def _beat(self) -> None:
        for number in list(self._peers):
            self._peers[number].send(self._clocks[number].beat())

    def _tell(self, number: int, message: Message) -> None:
        if isinstance(message, messages.Inspected):
            message = self._judged(message)
        if number:
            if number in self._peers:
                self._peers[number].send_frame(self._encoded(message))
            return
        if isinstance(message, Start | End):
            self._note_strangers()
        if isinstance(message, Start):
            self._start, self._pacing = message, None
            message = self._with_route(message)
        if isinstance(message, End) and message.outcome.code == 0:
            self._note_pace()
        self._hear(message)

    def _encoded(self, message: Message) -> bytes:
        """The frame of a message, which often goes to all nodes and is encoded once."""
        if self._frame[0] is not message:
            from ddplaunch.wire.typed import encode

            self._frame = message, encode(message)
        return self._frame[1]

    def _with_route(self, start: Start) -> Start:
        """Add what node 0's own ranks need: the address under which the others reached us."""
        if not self._peers:
            return start if self._listening is not None else replace(start, place=None, shares=())
        address = self._peers[min(self._peers)].here
        return replace(start, address=address, interface=self._rules.interface or interface_of(address))

    def _note_pace(self) -> None:
        for sentence in self._pacing.sentences() if self._pacing else ():
            self._hear(messages.Note(sentence))

    def _note_strangers(self) -> None:
        if self._listening is None:
            return
        strangers = self._listener.strangers
        if strangers.total() > self._counted:
            self._counted = strangers.total()
            reasons = named(f"{count} {why}" for why, count in strangers.most_common())
            plural = "s" if self._counted > 1 else ""
            text = f"{self._counted} connection{plural} to the control port did not belong to this job: {reasons}"
            self._hear(messages.Note(text))
