"""Doctor on nodes that the user starts one by one: they join node 0 on the control port and then answer its requests.

Each side proves to the other that it knows the token, if there is one. Node 0 can only send requests: variables and the
current folder are the node's own, so a false node 0 cannot run anything there.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ddplaunch.base.connection import MAX_UNAUTHENTICATED_FRAME, Connection
from ddplaunch.base.errors import EXIT_USAGE, LaunchError, UsageError, host_name
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.frames import ProtocolError, read_frame
from ddplaunch.base.options import Options
from ddplaunch.base.types import decode, encode
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.messages import (
    PROTOCOL_VERSION,
    JoinAccepted,
    JoinDeclined,
    JoinRefused,
    Message,
    NodeHello,
    Welcome,
)
from ddplaunch.core.net import token_auth
from ddplaunch.core.net.listener import ControlPortListener
from ddplaunch.core.options import Connections, Nodes
from ddplaunch.features.doctor.node_process import MANUAL_FLAG, NODE_STATEMENT
from ddplaunch.features.doctor.peers import DoctorPeer
from ddplaunch.system.network.addresses import resolve, unresolvable_error
from ddplaunch.system.network.reserved_port import listen_on_all_interfaces
from ddplaunch.system.plan.launch_command import python_command
from ddplaunch.system.plan.node_spec import NodeSpec
from ddplaunch.system.processes.proc_utils import die_with_parent
from ddplaunch.system.target.versions import Versions

RETRY_DELAY_S = 0.3  # between two attempts to connect
GREETING_TIMEOUT_S = 5.0  # for each message of the handshake
_CONNECT_TIMEOUT_S = 2.0  # for each of node 0's addresses; a lost packet costs one attempt
_MSS_BYTES = 1000  # these pass where packets of full size are lost, which is one of the things to diagnose
RUN_ID = "ddplaunch doctor"
"""The run id of the doctor: a job rejects the doctor's nodes because of it, and the doctor those of a job."""

_SAME_OPTIONS_HINT = "give all nodes the same --nnodes and the same DDPLAUNCH_TOKEN, and each its own --node-rank"


class ManualRendezvous:
    """Node 0's side: accepts the other nodes until all have joined or the timeout has passed."""

    def __init__(self, loop: EventLoop, port: int, nnodes: int, token: str | None) -> None:
        """Raises UsageError if the port is in use."""
        self._loop, self._nnodes = loop, nnodes
        self._config = JobConfig(max_nodes=nnodes, options=Options({Nodes: Nodes(token=token)}, {}))
        self._joined: dict[int, DoctorPeer] = {}
        try:
            listening = listen_on_all_interfaces(port)
        except OSError as error:
            what = f"cannot use port {port}, the one after --master-port: {os.strerror(error.errno or 0)}"
            hint = f"`ss -ltnp 'sport = :{port}'` shows the process; or give all nodes another --master-port"
            raise UsageError(what, hint) from None
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _MSS_BYTES)  # also for accepted connections
        self._listener = ControlPortListener(loop, listening, self._config, 0, self)

    @property
    def missing_nodes(self) -> list[int]:
        return [rank for rank in range(1, self._nnodes) if rank not in self._joined]

    def wait_for_nodes(self, seconds: float, check: Callable[[int], str]) -> list[DoctorPeer]:
        """Wait for the other nodes and return them; the port is free afterwards, and can be tested like others.

        ``check(rank)``: the command to run on a node that has not joined.
        """
        timer = self._loop.call_later(seconds, lambda: None)
        while self.missing_nodes and time.monotonic() < timer.when:
            self._loop.run_once()
        timer.cancel()
        self._listener.close()
        names = {host_name()}
        why = f"no connection within {seconds:g} s (--join-timeout)"
        peers = []
        for rank in range(1, self._nnodes):
            peer = self._joined.get(rank) or DoctorPeer(self._loop, f"node {rank}", why)
            if peer.name in names:
                peer.name += f" (node {rank})"
            names.add(peer.name)
            peer.check_command = check(rank)
            peers.append(peer)
        return peers

    def on_peer(self, connection: Connection[Any], hello: NodeHello | JoinDeclined, proven: str | None) -> None:
        if why := self._why_refused(hello):
            refused = JoinRefused(f"node 0 refuses {hello.name}: {why}", _SAME_OPTIONS_HINT)
            return self._listener.refuse(connection, refused)
        assert isinstance(hello, NodeHello)
        connection.send(JoinAccepted(RUN_ID, self._config.options[Connections].heartbeat_timeout, proven))
        peer = self._joined[hello.node_spec.node_rank] = DoctorPeer(self._loop, hello.node_spec.host)
        peer.connect(connection)

    def _why_refused(self, hello: NodeHello | JoinDeclined) -> str | None:
        if isinstance(hello, JoinDeclined) or hello.run_id != RUN_ID:
            return "it belongs to a job, and node 0 runs ddplaunch doctor"
        if hello.nnodes != str(self._nnodes):
            return f"it has --nnodes {hello.nnodes}, and node 0 has --nnodes {self._nnodes}"
        rank = hello.node_spec.node_rank
        if not 0 < rank < self._nnodes:
            return f"node rank {rank} is not among 1 to {self._nnodes - 1}"
        return f"node {rank} has already joined: {self._joined[rank].name}" if rank in self._joined else None


def join(
    address: str,
    port: int,
    node_rank: int,
    nnodes: int,
    token: str | None,
    seconds: float,
    notify: Callable[[str], None],
) -> int:
    """Join node 0 and reply to its requests until it is done; return its exit code. ``notify`` gets messages for users.

    Raises LaunchError if node 0 does not answer within ``seconds``, refuses this node or disconnects.
    """
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    share = NodeSpec(node_rank, host_name(), ("cpu",))
    hello = NodeHello(share, str(nnodes), RUN_ID, "doctor", None, 0, Versions(""), ())
    deadline = time.monotonic() + seconds
    reported = ""
    while isinstance(connection := _try_to_join(address, port, hello, token), str):
        if time.monotonic() + RETRY_DELAY_S > deadline:
            what = f"cannot reach node 0 within {seconds:g} s (--join-timeout): {where}: {connection}"
            hint = "run the same command there with --node-rank 0; check that no firewall blocks this port"
            raise LaunchError(what, hint)
        if connection != reported:
            reported = connection
            notify(f"waiting for node 0 (up to {seconds:g} s): {where}: {connection}")
        time.sleep(RETRY_DELAY_S)
    notify(f"node {node_rank} of {nnodes} has joined node 0 at {where}, which prints the report")
    code = _run_responder(connection)
    if code == EXIT_USAGE:
        raise LaunchError(f"{where} sent a request that this version cannot read", "use the same version on all nodes")
    if code not in (0, 1):
        gone = f"node 0 ({where}) closed the connection before its report was complete"
        raise LaunchError(gone, "see its output there")
    return code


def _run_responder(sock: socket.socket) -> int:
    """Run the process that replies to node 0's requests on a connection; return its exit code."""
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
    """Connect to node 0 and join it; or return why that failed. Raises UsageError if retrying is useless."""
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
        _do_handshake(sock, hello, token)
    except (OSError, EOFError, ProtocolError):
        sock.close()
        return "the connection is accepted, but not by ddplaunch doctor"
    except UsageError:
        sock.close()
        raise
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":  # a node 0 that lost power is noticed within 30 s, elsewhere after two hours
        for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock


def _do_handshake(sock: socket.socket, hello: NodeHello, token: str | None) -> None:
    """Do the handshake. Raises UsageError if node 0 refuses this node or does not know the token."""
    welcome = _receive(sock, Welcome)
    assert isinstance(welcome, Welcome)
    if welcome.ddplaunch != PROTOCOL_VERSION:
        raise UsageError("node 0 runs another version of ddplaunch", "install the same version on every node")
    nonces = (welcome.nonce, token_auth.new_nonce())
    proven = token_auth.compute_proof(token, token_auth.ROLE_MEMBER, nonces) if token else None
    sock.sendall(encode(replace(hello, nonce=nonces[1], proof=proven)))
    answer = _receive(sock, JoinAccepted, JoinRefused)
    if isinstance(answer, JoinRefused):
        why = answer.message.removeprefix(f"node 0 refuses {hello.name}: ")
        raise UsageError(f"node 0 refuses this node: {why}", _SAME_OPTIONS_HINT)
    assert isinstance(answer, JoinAccepted)
    if token and not token_auth.verify_proof(answer.proof, token, token_auth.ROLE_NODE_ZERO, nonces):
        raise UsageError("node 0 does not know the token", "give every node the same DDPLAUNCH_TOKEN")


def _receive(sock: socket.socket, *accepted: type[Message]) -> Message:
    """Wait for a message of these types. Raises OSError, EOFError or ProtocolError otherwise."""
    return decode(read_frame(sock, MAX_UNAUTHENTICATED_FRAME, time.monotonic() + GREETING_TIMEOUT_S), accepted)
