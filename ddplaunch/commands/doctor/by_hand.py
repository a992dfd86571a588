"""Nodes that people start one by one: they join node 0 at the port where the nodes of a job do, and then answer it.

Each side proves to the other that it knows the token, where there is one. Node 0 asks and gets answers, nothing else:
variables and the current folder are the node's own, so a false node 0 can run nothing there.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from ddplaunch.commands.doctor.node import MANUAL_FLAG, NODE_STATEMENT
from ddplaunch.commands.doctor.peers import DoctorPeer
from ddplaunch.control.listener import Listener
from ddplaunch.control.messages import (
    PROTOCOL_VERSION,
    JoinAccepted,
    JoinDeclined,
    JoinRefused,
    Message,
    NodeHello,
    Versions,
    Welcome,
)
from ddplaunch.control.port import listen_on_all_interfaces
from ddplaunch.control.route import resolve, unresolvable_error
from ddplaunch.control.rules import JobConfig
from ddplaunch.dataclass import replace
from ddplaunch.errors import EXIT_USAGE, LaunchError, UsageError, host_name
from ddplaunch.loop import EventLoop
from ddplaunch.plan.command import python_command
from ddplaunch.plan.share import NodeSpec
from ddplaunch.rank.processes import die_with_parent
from ddplaunch.wire import proof
from ddplaunch.wire.connection import MAX_UNAUTHENTICATED_FRAME, Connection
from ddplaunch.wire.frames import ProtocolError, read_frame
from ddplaunch.wire.typed import decode, encode

RETRY_DELAY_S = 0.3  # seconds between two tries
GREETING_TIMEOUT_S = 5.0  # seconds for each word of a greeting
_CONNECT_TIMEOUT_S = 2.0  # seconds for each of node 0's addresses; a lost packet costs one try
_MSS_BYTES = 1000  # bytes in a packet: these pass where those of full size are lost, which we are to find out
RUN_ID = "ddplaunch doctor"
"""A job refuses our nodes because of it, and we refuse those of a job."""

_SAME_OPTIONS_HINT = "give all nodes the same --nnodes and the same DDPLAUNCH_TOKEN, and each its own --node-rank"


class ManualRendezvous:
    """Node 0's side: the others join, until it has waited for them."""

    def __init__(self, loop: EventLoop, port: int, nnodes: int, token: str | None) -> None:
        """Raises UsageError where the port is taken."""
        self._loop, self._nnodes = loop, nnodes
        self._rules = JobConfig(max_nodes=nnodes, token=token)
        self._came: dict[int, DoctorPeer] = {}
        try:
            listening = listen_on_all_interfaces(port)
        except OSError as error:
            what = f"port {port}, the one after --master-port, cannot be used here: {os.strerror(error.errno or 0)}"
            hint = f"`ss -ltnp 'sport = :{port}'` shows who has it; or give all nodes another --master-port"
            raise UsageError(what, hint) from None
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _MSS_BYTES)  # also of what it accepts
        self._listener = Listener(loop, listening, self._rules, 0, self._on_peer)

    @property
    def missing_nodes(self) -> list[int]:
        return [rank for rank in range(1, self._nnodes) if rank not in self._came]

    def wait_for_nodes(self, seconds: float, check: Callable[[int], str]) -> list[DoctorPeer]:
        """Wait for the others and return them; the port is free then, and can be tried like others.

        ``check`` is what people may type on a node that does not come.
        """
        over = self._loop.call_later(seconds, lambda: None)
        while self.missing_nodes and time.monotonic() < over.when:
            self._loop.run_once()
        over.cancel()
        self._listener.close()
        names = {host_name()}
        why = f"it did not connect in {seconds:g} s (--join-timeout)"
        peers = []
        for rank in range(1, self._nnodes):
            peer = self._came.get(rank) or DoctorPeer(self._loop, f"node {rank}", why)
            if peer.name in names:
                peer.name += f" (node {rank})"
            names.add(peer.name)
            peer.check_command = check(rank)
            peers.append(peer)
        return peers

    def _on_peer(self, connection: Connection[Any], hello: NodeHello | JoinDeclined, proven: str | None) -> None:
        if why := self._refusal(hello):
            return self._listener.refuse(
                connection, JoinRefused(f"node 0 refuses {hello.name}: {why}", _SAME_OPTIONS_HINT)
            )
        assert isinstance(hello, NodeHello)
        connection.send(JoinAccepted(RUN_ID, self._rules.heartbeat_timeout, proven))
        peer = self._came[hello.node_spec.node_rank] = DoctorPeer(self._loop, hello.node_spec.host)
        peer.connect(connection)

    def _refusal(self, hello: NodeHello | JoinDeclined) -> str | None:
        if isinstance(hello, JoinDeclined) or hello.run_id != RUN_ID:
            return "it belongs to a job, and node 0 runs ddplaunch doctor"
        if hello.nnodes != str(self._nnodes):
            return f"node 0 has --nnodes {self._nnodes}, and it has --nnodes {hello.nnodes}"
        rank = hello.node_spec.node_rank
        if not 0 < rank < self._nnodes:
            return f"node rank {rank} is not among 1 to {self._nnodes - 1}"
        return f"node {rank} is there already: {self._came[rank].name}" if rank in self._came else None


def join(
    address: str, port: int, node_rank: int, nnodes: int, token: str | None, seconds: float, tell: Callable[[str], None]
) -> int:
    """Take part until node 0 says that was all; return its exit code. ``tell`` gets what people should know.

    Raises LaunchError where node 0 does not answer in so many seconds, refuses us or goes away.
    """
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    share = NodeSpec(node_rank, host_name(), ("cpu",))
    hello = NodeHello(share, str(nnodes), RUN_ID, "doctor", None, 0, Versions(""), ())
    until = time.monotonic() + seconds
    told = ""
    while isinstance(found := _try_to_join(address, port, hello, token), str):
        if time.monotonic() + RETRY_DELAY_S > until:
            what = f"node 0 was not reached in {seconds:g} s (--join-timeout): {where}: {found}"
            hint = "is the same command running there with --node-rank 0, and does a firewall let this port pass?"
            raise LaunchError(what, hint)
        if found != told:
            told = found
            tell(f"waiting for node 0 ({seconds:g} s at most): {where}: {found}")
        time.sleep(RETRY_DELAY_S)
    tell(f"node {node_rank} of {nnodes} answers node 0 at {where}, which prints the page")
    code = _run_responder(found)
    if code == EXIT_USAGE:
        raise LaunchError(f"{where} asks what ddplaunch cannot read", "use the same version on all nodes")
    if code not in (0, 1):
        gone = f"node 0 ({where}) closed the connection before its page was complete"
        raise LaunchError(gone, "see what it says there")
    return code


def _run_responder(sock: socket.socket) -> int:
    """Have a process of its own answer on this connection; return its exit code."""
    with sock:
        process = subprocess.Popen(
            [*python_command(sys.executable, NODE_STATEMENT), MANUAL_FLAG],
            stdin=sock.fileno(),
            stdout=sock.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    try:
        return process.wait()
    finally:
        process.kill()


def _try_to_join(address: str, port: int, hello: NodeHello, token: str | None) -> socket.socket | str:
    """Connect and join; or return why not. Raises UsageError where that will not change."""
    try:
        resolve(address)
    except OSError:
        raise unresolvable_error(address) from None
    try:
        sock = socket.create_connection((address, port), _CONNECT_TIMEOUT_S)
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return (error.strerror or type(error).__name__).lower()
    try:
        _join(sock, hello, token)
    except (OSError, EOFError, ProtocolError):
        sock.close()
        return "it accepts the connection, and does not answer as the doctor of node 0"
    except UsageError:
        sock.close()
        raise
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":  # a node 0 that has lost its power is noticed in half a minute, elsewhere in two hours
        for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock


def _join(sock: socket.socket, hello: NodeHello, token: str | None) -> None:
    """Be taken in. Raises UsageError where node 0 refuses this node or does not know the token."""
    welcome = _receive(sock, Welcome)
    assert isinstance(welcome, Welcome)
    if welcome.ddplaunch != PROTOCOL_VERSION:
        raise UsageError("node 0 runs another version of ddplaunch", "install the same version on every node")
    nonces = (welcome.nonce, proof.new_nonce())
    proven = proof.compute_proof(token, proof.ROLE_MEMBER, nonces) if token else None
    sock.sendall(encode(replace(hello, nonce=nonces[1], proof=proven)))
    answer = _receive(sock, JoinAccepted, JoinRefused)
    if isinstance(answer, JoinRefused):
        why = answer.message.removeprefix(f"node 0 refuses {hello.name}: ")
        raise UsageError(f"node 0 refuses this node: {why}", _SAME_OPTIONS_HINT)
    assert isinstance(answer, JoinAccepted)
    if token and not proof.verify_proof(answer.proof, token, proof.ROLE_NODE_ZERO, nonces):
        raise UsageError("node 0 does not know the token", "give every node the same DDPLAUNCH_TOKEN")


def _receive(sock: socket.socket, *accepted: type[Message]) -> Message:
    """Wait for a message. Raises OSError, EOFError or Garbled where none comes, or another one."""
    return decode(read_frame(sock, MAX_UNAUTHENTICATED_FRAME, time.monotonic() + GREETING_TIMEOUT_S), accepted)
