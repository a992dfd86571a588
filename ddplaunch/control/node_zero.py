"""Node 0's side of a job: the coordinator, the node in our own process, and the connections of all others."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

from ddplaunch import TYPE_CHECKING
from ddplaunch.control import limits, messages
from ddplaunch.control.clock_offset import LOCAL_CLOCK, UNKNOWN, ClockOffset, PeerClock
from ddplaunch.control.coordinator import Coordinator
from ddplaunch.control.heartbeat import HeartbeatMonitor
from ddplaunch.control.messages import (
    EndJob,
    ForwardSignal,
    FromNode,
    JoinDeclined,
    JoinRefused,
    Message,
    NodeHello,
    StartAttempt,
)
from ddplaunch.control.pacing import SlowRankDetector
from ddplaunch.control.relay import SignalDeduplicator
from ddplaunch.control.route import find_interface
from ddplaunch.control.rules import JobConfig
from ddplaunch.dataclass import replace
from ddplaunch.loop import EventLoop
from ddplaunch.wire.frames import ProtocolError
from ddplaunch.words import join_names

if TYPE_CHECKING:
    from ddplaunch.wire.connection import Connection

LINGER_S = 1.0  # seconds in which the others must have read that the job is over


class CoordinatorServer:
    """Coordinates the job from node 0; a job of one node needs no socket for it."""

    def __init__(
        self,
        loop: EventLoop,
        config: JobConfig,
        hello: NodeHello,
        run_id: str,
        on_message: Callable[[Message], None],
        listener_socket: socket.socket | None = None,
    ) -> None:
        """``on_message`` is the node in this process; ``listener_socket`` is bound to the control port, where there is one."""
        self._loop = loop
        self._rules = config
        self._run_id = run_id
        self._hear = on_message
        self._listening = listener_socket
        self._peers: dict[int, Connection[Message]] = {}
        self._clocks: dict[int, PeerClock] = {}
        self._leaving: list[Connection[Message]] = []
        self._ranks = len(hello.node_spec.devices)
        self._coordinator = Coordinator(config, hello, run_id, self._send, self._disconnect, loop.call_later)
        self._relay = SignalDeduplicator()
        self._counted = 0
        self._start: StartAttempt | None = None  # the latest
        self._pacing: SlowRankDetector | None = None
        self._frame: tuple[Message | None, bytes] = (None, b"")  # of the message that was last sent to a node

    def start(self) -> None:
        """Wait for the others, or start at once where there are none."""
        if self._listening is not None:
            from ddplaunch.control.listener import Listener

            self._listener = Listener(self._loop, self._listening, self._rules, self._ranks, self._on_peer)
            self._heartbeat = HeartbeatMonitor(
                self._loop, self._rules.heartbeat_timeout, self._send_heartbeats, self._on_silent_peer
            )
            if text := limits.find_low_limits(self._rules.max_nodes):
                self._hear(messages.NoteMessage(text))
        self._coordinator.start()

    def send(self, message: FromNode) -> None:
        if isinstance(message, messages.ArrivalsReported):
            return self._record_arrivals(0, message)
        if isinstance(message, ForwardSignal):
            return self._forward_signal(0, message)
        self._coordinator.on_message(0, message)

    def close(self) -> None:
        """Part from the others, once they have read how the job ended or had the time to."""
        if self._listening is None:
            return
        self._heartbeat.close()
        self._leaving = [*self._listener.close(), *self._peers.values()]
        for connection in self._peers.values():
            connection.close_gracefully(LINGER_S)
        self._peers.clear()

    @property
    def is_closed(self) -> bool:
        return not any(connection.is_open for connection in self._leaving)

    def _on_peer(self, connection: Connection[Message], hello: NodeHello | JoinDeclined, proof: str | None) -> None:
        if isinstance(hello, JoinDeclined):
            return self._listener.refuse(connection, self._coordinator.on_declined(hello))
        admitted = self._coordinator.check_hello(hello)
        if isinstance(admitted, JoinRefused):
            return self._listener.refuse(connection, admitted)
        number = admitted.node_spec.node_rank
        self._peers[number] = connection
        self._clocks[number] = PeerClock()
        connection.set_accepted_types(messages.FROM_NODE)
        connection.hear = partial(self._on_message, number)
        connection.lost = partial(self._on_disconnect, number)
        given, late = None if hello.has_node_rank else number, self._start is not None
        connection.send(messages.JoinAccepted(self._run_id, self._rules.heartbeat_timeout, proof, given, late))
        self._heartbeat.record(number)
        self._coordinator.add_node(admitted)

    def _on_message(self, number: int, message: Message) -> None:
        self._heartbeat.record(number)
        if isinstance(message, messages.HeartbeatMessage):
            return self._clocks[number].on_heartbeat(message)
        if isinstance(message, messages.ArrivalsReported):
            return self._record_arrivals(number, message)
        if isinstance(message, ForwardSignal):
            return self._forward_signal(number, message)
        if isinstance(message, messages.ProfileReply) and message.profile:
            message = replace(message, profile=message.profile.with_clock_offset(*self._clock_and_error(number)))
        self._coordinator.on_message(number, message)  # type: ignore[arg-type]  # the connection accepts nothing else

    def _forward_signal(self, number: int, message: ForwardSignal) -> None:
        """Have the ranks of all nodes get a signal that has come to one."""
        if self._relay.should_forward(number, message.number):
            for node in (0, *self._peers):
                self._send(node, message)

    def _record_arrivals(self, number: int, message: messages.ArrivalsReported) -> None:
        """Keep when ranks arrived at collectives, with what is known now of their clock."""
        if (pacing := self._slow_rank_detector()) is None:
            raise ProtocolError("collectives before the start")
        pacing.add_arrivals(number, message, self._clock_offset(number))

    def _slow_rank_detector(self) -> SlowRankDetector | None:
        """Those of the latest attempt."""
        if self._pacing is None and self._start is not None:
            self._pacing = SlowRankDetector(self._start)
        return self._pacing

    def _with_slow_ranks(self, message: messages.InspectReply) -> messages.InspectReply:
        """With who is slow in place of when the ranks arrived."""
        if any(rank.arrivals for rank in message.inspection.ranks) and (pacing := self._slow_rank_detector()):
            return replace(message, inspection=pacing.add_slow_ranks(message.inspection, self._clock_offset))
        return message

    def _clock_offset(self, number: int) -> ClockOffset:
        if number == 0:
            return LOCAL_CLOCK
        return self._clocks[number].best_offset() if number in self._clocks else UNKNOWN

    def _clock_and_error(self, number: int) -> tuple[float, float]:
        offset = self._clock_offset(number)
        return offset.offset_s, offset.error_s

    def _on_disconnect(self, number: int, why: str, silence: float = 0.0) -> None:
        self._remove_peer(number)
        self._coordinator.on_node_lost(number, why, silence)

    def _disconnect(self, number: int) -> None:
        self._remove_peer(number).close()

    def _remove_peer(self, number: int) -> Connection[Message]:
        self._heartbeat.remove_peer(number)
        del self._clocks[number]
        return self._peers.pop(number)

    def _on_silent_peer(self, number: int, seconds: float) -> None:
        self._peers[number].close()
        self._on_disconnect(number, f"nothing was heard of it for {seconds:.1f} s", seconds)

    def _send_heartbeats(self) -> None:
        for number in list(self._peers):
            self._peers[number].send(self._clocks[number].next_heartbeat())

    def _send(self, number: int, message: Message) -> None:
        if isinstance(message, messages.InspectReply):
            message = self._with_slow_ranks(message)
        if number:
            if number in self._peers:
                self._peers[number].send_frame(self._encode_once(message))
            return
        if isinstance(message, StartAttempt | EndJob):
            self._report_rejected_connections()
        if isinstance(message, StartAttempt):
            self._start, self._pacing = message, None
            message = self._with_node_zero_address(message)
        if isinstance(message, EndJob) and message.outcome.code == 0:
            self._report_slow_ranks()
        self._hear(message)

    def _encode_once(self, message: Message) -> bytes:
        """The frame of a message, which often goes to all nodes and is encoded once."""
        if self._frame[0] is not message:
            from ddplaunch.wire.typed import encode

            self._frame = message, encode(message)
        return self._frame[1]

    def _with_node_zero_address(self, start: StartAttempt) -> StartAttempt:
        """Add what node 0's own ranks need: the address under which the others reached us."""
        if not self._peers:
            return start if self._listening is not None else replace(start, assignment=None, node_specs=())
        address = self._peers[min(self._peers)].here
        return replace(start, address=address, interface=self._rules.interface or find_interface(address))

    def _report_slow_ranks(self) -> None:
        for sentence in self._pacing.describe() if self._pacing else ():
            self._hear(messages.NoteMessage(sentence))

    def _report_rejected_connections(self) -> None:
        if self._listening is None:
            return
        strangers = self._listener.strangers
        if strangers.total() > self._counted:
            self._counted = strangers.total()
            reasons = join_names(f"{count} {why}" for why, count in strangers.most_common())
            plural = "s" if self._counted > 1 else ""
            text = f"{self._counted} connection{plural} to the control port did not belong to this job: {reasons}"
            self._hear(messages.NoteMessage(text))
