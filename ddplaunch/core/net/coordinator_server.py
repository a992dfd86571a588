"""The coordinator server, in node 0's launcher: feeds the job's machine with events, and executes its commands.

It connects the machine with the node in this process and, through the control port, with all other nodes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial
from itertools import count

from msgspec.structs import replace

from ddplaunch.base.connection import Connection
from ddplaunch.base.event_loop import EventLoop, WakeTimer
from ddplaunch.base.safe_files import current_folder
from ddplaunch.base.text import join_names
from ddplaunch.base.types import encode
from ddplaunch.core import messages
from ddplaunch.core.clock_offset import PeerClock
from ddplaunch.core.deadlines import Now
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.job import commands as do
from ddplaunch.core.job import job_events as ev
from ddplaunch.core.job.machine import JobMachine
from ddplaunch.core.job.rpc import convert_payload
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.machine import Command, MachineEvent
from ddplaunch.core.messages import EndJob, FromNode, JoinDeclined, Message, NodeHello, StartAttempt
from ddplaunch.core.net.heartbeat_monitor import HeartbeatMonitor
from ddplaunch.core.net.listener import ControlPortListener
from ddplaunch.core.options import Connections, Nodes
from ddplaunch.system.network import kernel_limits
from ddplaunch.system.network.addresses import find_interface

LINGER_S = 1.0  # for EndJob to be delivered to the other nodes


class CoordinatorServer:
    """Runs the job's machine, and owns all connections to other nodes; without sockets in a job of one node."""

    def __init__(
        self,
        loop: EventLoop,
        config: JobConfig,
        hello: NodeHello,
        run_id: str,
        on_message: Callable[[Message], None],
        listener_socket: socket.socket | None = None,
    ) -> None:
        """``on_message`` gets messages to node 0 itself, and calls this object only after it has returned.

        ``listener_socket`` listens on the control port, if any.
        """
        self._loop = loop
        self._config = config
        self._options = config.options
        self._run_id = run_id
        self._on_message = on_message
        self._listener_socket = listener_socket
        self._peers: dict[int, Connection[Message]] = {}
        self._clocks: dict[int, PeerClock] = {}
        self._closing: list[Connection[Message]] = []
        self._local_ranks = len(hello.node_spec.devices)
        self._machine = JobMachine(replace(config, folder=current_folder()), hello, run_id)
        self._timer = WakeTimer(loop, partial(self._handle, ev.DeadlineDue()))
        self._newcomers: dict[int, tuple[Connection[Message], str | None]] = {}  # with the proof for each
        self._connection_numbers = count()
        self._reported = 0
        self._frame: tuple[Message | None, bytes] = (None, b"")  # the last message to another node, encoded

    def start(self) -> None:
        """Accept connections, and start the job when enough nodes have joined; at once in a job of one node."""
        if self._listener_socket is not None:
            self._listener = ControlPortListener(
                self._loop, self._listener_socket, self._config, self._local_ranks, self
            )
            self._heartbeat = HeartbeatMonitor(self._loop, self._options[Connections].heartbeat_timeout, self)
            if text := kernel_limits.describe_low_limits(self._config.max_nodes):
                self._on_message(messages.NoteMessage(text))
        self._handle(ev.Start())

    def send(self, message: Message) -> None:
        """Pass a message of node 0's own launcher to the job's machine."""
        self._handle(ev.MessageReceived(0, message))

    def _handle(self, event: MachineEvent) -> None:
        """Pass an event to the job machine and execute the resulting commands; none of them causes another event.

        Raises ProtocolError if a node cannot have sent this message; its ``ConnectionLost`` follows.
        """
        for command in self._machine.on(event, Now(time.monotonic(), time.time())):
            self._execute(command)
        self._timer.set(self._machine.wake_at())

    def _execute(self, command: Command) -> None:
        match command:
            case do.Send(number, message):
                self._send(number, message)
            case do.Disconnect(number):
                if number in self._peers:
                    self._remove_peer(number).close()
            case do.Accept(connection, hello, late):
                self._accept(connection, hello, late=late)
            case do.Refuse(connection, refusal):
                self._listener.refuse(self._newcomers.pop(connection)[0], refusal)

    def close(self) -> None:
        """Stop listening; close the connections once EndJob is delivered, or after LINGER_S."""
        if self._listener_socket is None:
            return
        self._heartbeat.close()
        self._closing = [*self._listener.close(), *self._peers.values()]
        for connection in self._peers.values():
            connection.close_gracefully(LINGER_S)
        self._peers.clear()

    @property
    def is_closed(self) -> bool:
        return not any(connection.is_open for connection in self._closing)

    def on_peer(self, connection: Connection[Message], hello: NodeHello | JoinDeclined, proof: str | None) -> None:
        number = next(self._connection_numbers)
        self._newcomers[number] = connection, proof
        self._handle(ev.HelloReceived(number, hello))

    def _accept(self, connection_number: int, hello: NodeHello, *, late: bool) -> None:
        connection, proof = self._newcomers.pop(connection_number)
        number = hello.node_spec.node_rank
        if number in self._peers:  # of a node that was left out, and has not closed it yet
            self._remove_peer(number).close_gracefully(LINGER_S)
        self._peers[number] = connection
        self._clocks[number] = PeerClock()
        connection.set_accepted_types(load_features().message_types(FromNode))
        connection.on_message = partial(self._on_peer_message, number)
        connection.on_lost = partial(self._on_disconnect, number)
        assigned = None if hello.has_node_rank else number
        connection.send(
            messages.JoinAccepted(self._run_id, self._options[Connections].heartbeat_timeout, proof, assigned, late)
        )
        self._heartbeat.record(number)

    def _on_peer_message(self, number: int, message: Message) -> None:
        self._heartbeat.record(number)
        if isinstance(message, messages.HeartbeatMessage):
            self._clocks[number].on_heartbeat(message)
            return self._handle(ev.ClockMeasured(number, self._clocks[number].best_offset()))
        self._handle(ev.MessageReceived(number, convert_payload(message)))

    def _on_disconnect(self, number: int, why: str, silence: float = 0.0) -> None:
        self._remove_peer(number)
        self._handle(ev.ConnectionLost(number, why, silence))

    def _remove_peer(self, number: int) -> Connection[Message]:
        self._heartbeat.remove_peer(number)
        del self._clocks[number]
        return self._peers.pop(number)

    def on_silent_peer(self, number: int, seconds: float) -> None:
        self._peers[number].close()
        self._on_disconnect(number, f"no heartbeat for {seconds:.1f} s", seconds)

    def send_heartbeats(self) -> None:
        for number in list(self._peers):
            self._peers[number].send(self._clocks[number].build_heartbeat())

    def _send(self, number: int, message: Message) -> None:
        if number:
            if number in self._peers:
                self._peers[number].send_frame(self._encode_once(message))
            return
        if isinstance(message, StartAttempt | EndJob):
            self._report_rejected_connections()
        if isinstance(message, StartAttempt):
            message = self._with_node_zero_address(message)
        self._on_message(message)

    def _encode_once(self, message: Message) -> bytes:
        """Return the frame of a message; one that goes to all nodes is encoded once."""
        if self._frame[0] is not message:
            self._frame = message, encode(message)
        return self._frame[1]

    def _with_node_zero_address(self, start: StartAttempt) -> StartAttempt:
        """Add the address to which the other nodes have connected: node 0's own ranks use it too."""
        if not self._peers:
            return start if self._listener_socket is not None else replace(start, assignment=None, node_specs=())
        address = self._peers[min(self._peers)].here
        return replace(start, address=address, interface=self._options[Nodes].interface or find_interface(address))

    def _report_rejected_connections(self) -> None:
        if self._listener_socket is None:
            return
        rejected = self._listener.rejected
        if rejected.total() > self._reported:
            self._reported = rejected.total()
            reasons = join_names(f"{count} {why}" for why, count in rejected.most_common())
            plural = "s" if self._reported > 1 else ""
            text = f"{self._reported} connection{plural} to the control port did not belong to this job: {reasons}"
            self._on_message(messages.NoteMessage(text))
