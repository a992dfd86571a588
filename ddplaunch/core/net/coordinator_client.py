"""The coordinator client, on every node but node 0: the sockets, look-ups and heartbeats of its connection to node 0.

``LinkMachine`` decides; this gives it events, and executes its commands.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from ddplaunch.base.connection import MAX_UNAUTHENTICATED_FRAME, Connection
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core import messages
from ddplaunch.core.clock_offset import PeerClock
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.job.rpc import convert_payload
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.machine import Command
from ddplaunch.core.machine_driver import MachineDriver
from ddplaunch.core.messages import JoinDeclined, Message, NodeHello
from ddplaunch.core.net import link_commands as do
from ddplaunch.core.net import link_events as ev
from ddplaunch.core.net import token_auth
from ddplaunch.core.net.heartbeat_monitor import HeartbeatMonitor
from ddplaunch.core.net.link_machine import LinkMachine
from ddplaunch.core.options import Nodes
from ddplaunch.system.network import addresses
from ddplaunch.system.network.addresses import SocketAddress

LINGER_S = 0.5  # for the last messages to be delivered


class CoordinatorClient:
    """The connection of one node to the coordinator, from the first attempt to connect until the end of the job."""

    def __init__(
        self, loop: EventLoop, config: JobConfig, hello: NodeHello | JoinDeclined, on_message: Callable[[Message], None]
    ) -> None:
        """``on_message`` gets the messages to this node. If ``hello`` is a JoinDeclined, this node does not join."""
        assert config.port is not None
        self._loop, self._config, self._on_message = loop, config, on_message
        self._options = config.options
        self._port = config.port
        self._machine = LinkMachine(config, hello)
        self._post = MachineDriver(loop, self._machine, self._execute).post
        self._connecting: dict[int, socket.socket] = {}
        self._connection: Connection[Message] | None = None
        self._heartbeat: HeartbeatMonitor | None = None
        self._peer_clock = PeerClock()

    def start(self) -> None:
        """Start connecting to node 0, for up to --join-timeout."""
        self._post(ev.Start())

    def send(self, message: Message) -> None:
        """Send a message of this node to node 0; while node 0 is not connected, act on the message locally."""
        self._post(ev.MessagePosted(message))

    def close(self) -> None:
        self._post(ev.Closed())
        if self._heartbeat is not None:
            self._heartbeat.close()
        if self._connection is not None:
            self._connection.close_gracefully(LINGER_S)

    @property
    def is_closed(self) -> bool:
        """Whether the last messages have been sent."""
        return self._connection is None or not self._connection.is_open

    def _execute(self, command: Command) -> None:
        match command:
            case do.Resolve():
                self._resolve()
            case do.Connect(number=number, address=address):
                self._connect(number, address)
            case do.StopConnecting():
                self._stop_connecting()
            case do.AwaitReply():
                self._accept_types(messages.JoinAccepted, messages.JoinRefused)
            case do.BeginHeartbeats(timeout_s=timeout_s):
                self._begin_heartbeats(timeout_s)
            case do.Send(message=message):
                if self._connection is not None:
                    self._connection.send(message)
            case do.Disconnect():
                self._disconnect()
            case do.Deliver(message=message):
                self._deliver(message)
            case _:
                raise AssertionError(command)

    # ------------------------------------------------------------------------------------------------------ connecting

    def _resolve(self) -> None:
        lookup = addresses.NameLookup(self._config.address, self._port)
        self._loop.watch_fd(lookup.fileno(), partial(self._on_resolved, lookup))

    def _on_resolved(self, lookup: addresses.NameLookup) -> None:
        self._loop.unwatch_fd(lookup.fileno())
        lookup.close()
        error = None if lookup.error is None else lookup.error.errno or 0
        self._post(ev.Resolved(tuple(lookup.addresses), error))

    def _connect(self, number: int, address: SocketAddress) -> None:
        family, where = address
        try:
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            return self._post(ev.ConnectFailed(number, None, at_once=True))
        try:
            interface = self._options[Nodes].interface
            if interface and (source := addresses.find_address(interface, family)):
                sock.bind((source, 0))
            sock.connect(where)
        except BlockingIOError:
            pass
        except OSError as error:
            sock.close()
            return self._post(ev.ConnectFailed(number, error.errno or 0, at_once=True))
        self._connecting[number] = sock
        self._loop.watch_fd(sock.fileno(), partial(self._on_connected, number), write=True)

    def _on_connected(self, number: int) -> None:
        sock = self._connecting.pop(number)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if not code and sock.getsockname() == sock.getpeername():
                # TCP simultaneous open: the kernel chose node 0's port as the local port, so nothing listens there.
                code = errno.ECONNREFUSED
        except OSError as error:  # reset already
            code = error.errno or errno.ECONNRESET
        self._loop.unwatch_fd(sock.fileno())
        if code:
            sock.close()
            return self._post(ev.ConnectFailed(number, code))
        self._connection = Connection(
            self._loop, sock, (messages.Welcome,), self._on_peer_message, self._on_lost, MAX_UNAUTHENTICATED_FRAME
        )
        self._post(ev.Connected(number, token_auth.new_nonce()))

    def _stop_connecting(self) -> None:
        for sock in self._connecting.values():
            self._loop.unwatch_fd(sock.fileno())
            sock.close()
        self._connecting.clear()

    # ------------------------------------------------------------------------------------------------------- connected

    def _accept_types(self, *kinds: type[Message]) -> None:
        if self._connection is not None:
            self._connection.set_accepted_types(kinds, MAX_UNAUTHENTICATED_FRAME)

    def _begin_heartbeats(self, timeout_s: float) -> None:
        assert self._connection is not None
        self._connection.set_accepted_types(load_features().message_types(messages.FromNodeZero))
        self._peer_clock = PeerClock()
        self._heartbeat = HeartbeatMonitor(self._loop, timeout_s, self)
        self._heartbeat.record(0)

    def _on_peer_message(self, message: Message) -> None:
        if self._heartbeat is not None:
            self._heartbeat.record(0)
        if isinstance(message, messages.HeartbeatMessage):
            return self._peer_clock.on_heartbeat(message)
        self._post(ev.MessageReceived(0, convert_payload(message)))

    def _deliver(self, message: Message) -> None:
        """Pass a message on to this node; add the address of node 0 and the network interface to a StartAttempt."""
        if isinstance(message, messages.StartAttempt) and self._connection is not None:
            interface = self._options[Nodes].interface or addresses.find_interface(self._connection.here)
            message = replace(message, address=self._connection.there, interface=interface)
        self._on_message(message)

    def send_heartbeats(self) -> None:
        if self._connection is not None:
            self._connection.send(self._peer_clock.build_heartbeat())

    def on_silent_peer(self, peer: int, seconds: float) -> None:
        self._disconnect()
        self._on_lost(f"no heartbeat for {seconds:.1f} s")

    def _on_lost(self, why: str) -> None:
        self._post(ev.ConnectionLost(why))

    def _disconnect(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
