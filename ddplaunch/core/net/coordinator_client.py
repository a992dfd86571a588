"""The coordinator client, on every node but node 0: connects to node 0, joins, exchanges messages, detects its loss."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from enum import Enum
from functools import partial

from msgspec.structs import replace

from ddplaunch.base.connection import MAX_UNAUTHENTICATED_FRAME, Connection
from ddplaunch.base.errors import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.base.event_loop import EventLoop, Timer
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.text import signal_name
from ddplaunch.core import messages
from ddplaunch.core.clock_offset import PeerClock
from ddplaunch.core.failures import JobResult
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.job.rpc import check_payload
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.messages import (
    PROTOCOL_VERSION,
    JoinDeclined,
    Message,
    NodeHello,
    StartAttempt,
    StopAttempt,
)
from ddplaunch.core.net import token_auth
from ddplaunch.core.net.heartbeat_monitor import HeartbeatMonitor
from ddplaunch.core.options import Connections, Nodes, Stopping
from ddplaunch.system.network import addresses

RETRY_DELAYS_S = (0.1, 0.2, 0.4, 0.7, 1.0)  # between connection attempts; the last one repeats
FIRST_NOTICE_S = 0.3  # after the start, until it prints that node 0 does not answer yet
CONNECT_TIMEOUT_S = 4.0  # for a TCP connection, or a DNS result that leads to one
NEXT_ADDRESS_DELAY_S = 0.25  # before the next address of node 0 is tried in parallel (RFC 8305)
WELCOME_TIMEOUT_S = 5.0  # for node 0's Welcome, and for its reply to the hello
DECLINE_TIMEOUT_S = 3.0  # for a node that cannot start its ranks to reach node 0 and report that
LINGER_S = 0.5  # for the last messages to be delivered

NOT_NODE_ZERO_ERROR = "{where} does not answer as node 0: another program listens there, or node 0 is overloaded"
CLOSED_ERROR = "{where} accepts the connection and closes it"


class ConnectionState(Enum):
    """The state of the connection to node 0."""

    SEEKING = "not joined yet: connecting, or waiting for the reply"
    JOINED = "joined"
    ORPHANED = "connection lost while ranks were running"
    OVER = "the job has ended"


_TRANSITIONS = {
    ConnectionState.SEEKING: {ConnectionState.JOINED, ConnectionState.OVER},
    ConnectionState.JOINED: {ConnectionState.SEEKING, ConnectionState.ORPHANED, ConnectionState.OVER},
    ConnectionState.ORPHANED: {ConnectionState.OVER},
    ConnectionState.OVER: {ConnectionState.OVER},
}


class CoordinatorClient:
    """The connection of one node to the coordinator, from the first attempt to connect until the end of the job."""

    def __init__(
        self, loop: EventLoop, config: JobConfig, hello: NodeHello | JoinDeclined, on_message: Callable[[Message], None]
    ) -> None:
        """``on_message`` gets the messages to this node. With a JoinDeclined it only delivers that."""
        assert config.port is not None
        self._loop = loop
        self._config = config
        self._options = config.options
        self._port = config.port
        self._hello = hello
        self._on_message = on_message
        self._state = ConnectionState.SEEKING
        self._retries = 0
        self._problem = f"{self.address} has not answered yet"
        self._addresses: list[tuple[socket.AddressFamily, tuple[str, int]]] = []
        self._connecting: list[socket.socket] = []
        self._connection: Connection[Message] | None = None
        self._heartbeat: HeartbeatMonitor | None = None
        self._peer_clock = PeerClock()
        self._attempt: int | None = None  # the attempt of which ranks may be left here
        self._latest = -1  # the latest attempt that has started here; -1 before the first
        self._has_begun = False  # whether node 0 has ordered more than a check
        self._stop_signal: int | None = None
        self._why_lost = ""
        self._start_error: messages.NodeStartError | None = None
        self._step_timer: Timer | None = None

    def _set_state(self, state: ConnectionState) -> None:
        assert state in _TRANSITIONS[self._state], f"{self._state} to {state}"
        self._state = state

    @property
    def address(self) -> str:
        """Node 0's control port, for messages: "n0:29501"."""
        address = self._config.address
        return f"[{address}]:{self._port}" if ":" in address else f"{address}:{self._port}"

    def start(self) -> None:
        """Start connecting to node 0, for up to --join-timeout."""
        self._began_at = time.monotonic()
        self._deadline = self._loop.call_later(self._options[Connections].join_timeout, self._give_up)
        self._loop.call_later(FIRST_NOTICE_S, self._report_trouble)
        self._resolve_address()

    def send(self, message: Message) -> None:
        """Send a message of this node to node 0; also act on it while node 0 is not connected."""
        if isinstance(message, messages.StopRequested):
            self._stop_signal = message.signal
        if isinstance(message, messages.AttemptReport) and message.attempt == self._attempt:
            self._attempt = None
        if self._connection is not None and (self._state is ConnectionState.JOINED or self._may_have_joined(message)):
            self._connection.send(message)
        if isinstance(message, messages.ForwardSignal):
            return  # does not change the state of this node
        if isinstance(message, messages.PreemptionNotice) and self._state is ConnectionState.SEEKING:
            name = signal_name(message.signal)
            return self._finish(JobResult(EXIT_PREEMPTED, remark=f"preempted by {name}: no rank was running"))
        if isinstance(message, messages.NodeStartError) and self._state is ConnectionState.SEEKING:
            self._start_error = message  # sent after joining, so that the other nodes learn it too
            self._loop.call_later(DECLINE_TIMEOUT_S, partial(self._end_with_usage_error, message.message, message.hint))
        # Without ranks here, leave at once on a stop request. But how an attempt ended is decided by node 0, whatever
        # else is sent to it meanwhile: another node may have got a signal earlier. So is when other programs end.
        runs_only_programs = self._has_begun and self._latest < 0
        wants_to_leave = isinstance(message, messages.StopRequested) and not runs_only_programs
        if self._attempt is None and (wants_to_leave or self._state is ConnectionState.ORPHANED):
            self._end_without_coordinator()

    def _may_have_joined(self, message: Message) -> bool:
        """Whether the hello was sent and the reply may be on its way: node 0 then expects the reason for leaving."""
        assert self._connection is not None
        return isinstance(message, messages.StopRequested) and self._connection.on_message == self._on_join_reply

    def close(self) -> None:
        self._set_state(ConnectionState.OVER)
        self._stop_connecting()
        if self._heartbeat is not None:
            self._heartbeat.close()
        if self._connection is not None:
            self._connection.close_gracefully(LINGER_S)

    @property
    def is_closed(self) -> bool:
        """Whether the last messages have been sent."""
        return self._connection is None or not self._connection.is_open

    # ------------------------------------------------------------------------------------------------------ connecting

    def _resolve_address(self) -> None:
        if self._state is ConnectionState.SEEKING:
            lookup = addresses.NameLookup(self._config.address, self._port)
            self._loop.watch_fd(lookup.fileno(), partial(self._on_resolved, lookup))

    def _on_resolved(self, lookup: addresses.NameLookup) -> None:
        self._loop.unwatch_fd(lookup.fileno())
        lookup.close()
        if self._state is not ConnectionState.SEEKING:
            return
        if lookup.error is not None:
            if lookup.error.errno in (socket.EAI_AGAIN, socket.EAI_SYSTEM):
                return self._retry(f"the name server does not answer for {self._config.address}")
            return self._retry(f"{self._config.address} does not resolve yet")
        self._addresses = lookup.addresses
        self._retry_after(CONNECT_TIMEOUT_S, "{where} does not answer: does a firewall block it?")
        self._connect_next()

    def _connect_next(self) -> None:
        """Try the next address, and soon another in parallel; the first connection wins (Happy Eyeballs, RFC 8305)."""
        while self._addresses and not self._connect(*self._addresses.pop(0)):
            pass
        if self._addresses:
            self._loop.call_later(NEXT_ADDRESS_DELAY_S, partial(self._connect_next_later, self._connecting[-1]))
        elif not self._connecting:
            self._retry(self._problem)

    def _connect_next_later(self, last: socket.socket) -> None:
        if last in self._connecting:
            self._connect_next()

    def _connect(self, family: socket.AddressFamily, where: tuple[str, int]) -> bool:
        """Start one connection; return False if it has failed already."""
        try:
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            return False
        try:
            interface = self._options[Nodes].interface
            if interface and (source := addresses.find_address(interface, family)):
                sock.bind((source, 0))
            sock.connect(where)
        except BlockingIOError:
            pass
        except OSError as error:
            self._problem = self._connect_error(error.errno or 0)
            sock.close()
            return False
        self._connecting.append(sock)
        self._loop.watch_fd(sock.fileno(), partial(self._on_connected, sock), write=True)
        return True

    def _on_connected(self, sock: socket.socket) -> None:
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if not code and sock.getsockname() == sock.getpeername():
                # TCP simultaneous open: the kernel chose node 0's port as the local port, so nothing listens there.
                code = errno.ECONNREFUSED
        except OSError as error:  # reset already
            code = error.errno or errno.ECONNRESET
        self._loop.unwatch_fd(sock.fileno())
        self._connecting.remove(sock)
        if code:
            sock.close()
            self._problem = self._connect_error(code)
            if not self._connecting:
                self._connect_next()
            return
        self._stop_connecting()
        accepted = (messages.Welcome,)
        self._connection = Connection(
            self._loop, sock, accepted, self._on_welcome, self._give_up_wrong_peer, MAX_UNAUTHENTICATED_FRAME
        )
        self._retry_after(WELCOME_TIMEOUT_S, NOT_NODE_ZERO_ERROR)

    def _connect_error(self, code: int) -> str:
        host = self._config.address
        here = f" ({host} is this machine)" if host == "localhost" else ""
        return f"{self.address}: {os.strerror(code).lower()}{here}"

    def _retry_after(self, seconds: float, problem: str) -> None:
        if self._step_timer is not None:
            self._step_timer.cancel()
        self._step_timer = self._loop.call_later(seconds, lambda: self._retry(problem.format(where=self.address)))

    def _stop_connecting(self) -> None:
        for sock in self._connecting:
            self._loop.unwatch_fd(sock.fileno())
            sock.close()
        self._connecting.clear()
        if self._step_timer is not None:
            self._step_timer.cancel()
            self._step_timer = None

    def _retry(self, problem: str) -> None:
        self._stop_connecting()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._state is not ConnectionState.SEEKING:
            return
        self._problem = problem
        if time.monotonic() - self._began_at > FIRST_NOTICE_S:
            self._report_trouble()
        self._loop.call_later(RETRY_DELAYS_S[min(self._retries, len(RETRY_DELAYS_S) - 1)], self._resolve_address)
        self._retries += 1

    def _report_trouble(self) -> None:
        if self._state is ConnectionState.SEEKING:
            self._on_message(messages.ConnectingToNodeZero(self._problem))

    def _give_up(self) -> None:
        if self._state is ConnectionState.SEEKING:
            timeout_s = self._options[Connections].join_timeout
            why = f"node 0 was not reached in {timeout_s:g} s (--join-timeout): {self._problem}"
            with_rank = (
                " with --node-rank 0" if isinstance(self._hello, NodeHello) and self._hello.has_node_rank else ""
            )
            hint = f"is the same command running there{with_rank}, and is the port open from here?"
            self._finish(JobResult(EXIT_UNAVAILABLE, remark=f"{why}\n  {hint}"))

    # ------------------------------------------------------------------------------------------------------ joining

    def _give_up_wrong_peer(self, why: str) -> None:
        closed = "closed" in why or "broke" in why
        self._connection = None
        self._retry((CLOSED_ERROR if closed else NOT_NODE_ZERO_ERROR).format(where=self.address))

    def _on_welcome(self, message: Message) -> None:
        assert isinstance(message, messages.Welcome)
        if self._state is not ConnectionState.SEEKING:
            return
        connection = self._connection
        assert connection is not None
        if message.ddplaunch != PROTOCOL_VERSION:
            spoken = f"it speaks protocol {message.ddplaunch}, this one {PROTOCOL_VERSION}"
            why = f"node 0 runs another version of ddplaunch: {spoken}"
            return self._end_with_usage_error(why, "install the same version on every node")
        ours = token_auth.new_nonce()
        self._nonces = (message.nonce, ours)
        token = self._options[Nodes].token
        proven = token_auth.compute_proof(token, token_auth.ROLE_MEMBER, self._nonces) if token else None
        connection.set_accepted_types((messages.JoinAccepted, messages.JoinRefused), MAX_UNAUTHENTICATED_FRAME)
        connection.on_message = self._on_join_reply
        connection.send(replace(self._hello, nonce=ours, proof=proven))
        self._retry_after(WELCOME_TIMEOUT_S, "node 0 at {where} did not complete the handshake")

    def _on_join_reply(self, message: Message) -> None:
        assert self._connection is not None
        if self._state is not ConnectionState.SEEKING:
            return
        if isinstance(message, messages.JoinRefused):
            return self._end_with_usage_error(message.message, message.hint)
        assert isinstance(message, messages.JoinAccepted)
        if isinstance(self._hello, JoinDeclined):
            raise ProtocolError("a JoinAccepted for a node that declined")
        given = message.node_rank
        if given is not None and (self._hello.has_node_rank or not 0 < given < self._config.max_nodes):
            raise ProtocolError("a node rank that this node cannot have")
        token = self._options[Nodes].token
        if token and not token_auth.verify_proof(message.proof, token, token_auth.ROLE_NODE_ZERO, self._nonces):
            return self._end_with_usage_error(
                f"node 0 at {self.address} does not know the token", "give every node the same --token"
            )
        self._stop_connecting()
        if given is not None:  # should node 0 restart before the first attempt, prefer the same node rank
            self._hello = replace(self._hello, node_spec=replace(self._hello.node_spec, node_rank=given))
        self._set_state(ConnectionState.JOINED)
        self._deadline.cancel()
        self._retries = 0
        self._connection.set_accepted_types(load_features().message_types(messages.FromNodeZero))
        self._connection.on_message = self._on_joined_message
        self._connection.on_lost = self._on_disconnect
        self._peer_clock = PeerClock()
        self._heartbeat = HeartbeatMonitor(self._loop, message.heartbeat_timeout_s, self)
        self._heartbeat.record(0)
        if self._start_error is not None:
            return self._connection.send(self._start_error)
        self._on_message(message)

    # ------------------------------------------------------------------------------------------------------- joined

    def _on_joined_message(self, message: Message) -> None:
        assert self._heartbeat is not None
        assert self._connection is not None
        if self._state is ConnectionState.OVER:
            return
        self._heartbeat.record(0)
        match message:
            case messages.HeartbeatMessage():
                return self._peer_clock.on_heartbeat(message)
            case messages.JoinStatus() if self._latest >= 0:
                raise ProtocolError("a JoinStatus after the start")
            case messages.EndJob():
                self._set_state(ConnectionState.OVER)
            case StartAttempt():
                self._validate_start(message)
                self._attempt = self._latest = message.attempt
                self._has_begun = True
                interface = self._options[Nodes].interface or addresses.find_interface(self._connection.here)
                message = replace(message, address=self._connection.there, interface=interface)
            case messages.AttemptMessage() if not isinstance(message, messages.CheckRequest):
                self._has_begun = True
        self._on_message(check_payload(message))

    def _validate_start(self, order: StartAttempt) -> None:
        """Raise ProtocolError unless this starts a new attempt and the assignment fits this node's ranks."""
        assert isinstance(self._hello, NodeHello)
        if self._attempt is not None or order.attempt <= self._latest:
            raise ProtocolError("a start out of turn")
        place, share = order.assignment, self._hello.node_spec
        if place is None or order.node_specs or not place.nnodes <= self._config.max_nodes:
            raise ProtocolError("a start without this node")
        if not (0 < place.node_rank < place.nnodes and place.node_rank <= place.first_rank):
            raise ProtocolError("a start at another node's place")
        if place.first_rank + len(share.devices) > place.world_size:
            raise ProtocolError("a start with other ranks than this node's")

    def send_heartbeats(self) -> None:
        if self._connection is not None:
            self._connection.send(self._peer_clock.build_heartbeat())

    def on_silent_peer(self, peer: int, seconds: float) -> None:
        if self._connection is not None:
            self._connection.close()
        self._on_disconnect(f"no heartbeat for {seconds:.1f} s")

    def _on_disconnect(self, why: str) -> None:
        """Called when node 0 is lost: before the first attempt connect again, else stop the ranks and end."""
        self._connection = None
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        if self._state is not ConnectionState.JOINED:
            return
        if not self._has_begun:
            self._set_state(ConnectionState.SEEKING)
            self._deadline = self._loop.call_later(self._options[Connections].join_timeout, self._give_up)
            return self._retry(f"node 0 at {self.address} was lost: {why}")
        self._set_state(ConnectionState.ORPHANED)
        self._why_lost = f"node 0 ({self._config.address}) was lost: {why}"
        if self._attempt is None:
            return self._end_without_coordinator()
        self._on_message(messages.CoordinatorLost())
        self._on_message(messages.NoteMessage(f"{self._why_lost}; stopping the ranks here"))
        self._on_message(StopAttempt(self._attempt, signal.SIGTERM, self._options[Stopping].grace))

    def _end_with_usage_error(self, message: str, hint: str | None) -> None:
        self._finish(JobResult(EXIT_USAGE, usage_error=(message, hint)))

    def _end_without_coordinator(self) -> None:
        lost = JobResult(EXIT_UNAVAILABLE, remark=self._why_lost)
        self._finish(lost if self._stop_signal is None else JobResult(EXIT_SIGNAL + self._stop_signal))

    def _finish(self, outcome: JobResult) -> None:
        if self._state is not ConnectionState.OVER:
            self._set_state(ConnectionState.OVER)
            self._on_message(messages.CoordinatorLost())
            self._on_message(messages.EndJob(outcome))
