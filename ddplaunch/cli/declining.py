"""Reports a usage error on one node to the other nodes of the job, which then end with it too."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from msgspec.structs import replace

from ddplaunch.base.connection import Connection
from ddplaunch.base.errors import UsageError, host_name
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.options import Options, OptionSource
from ddplaunch.cli.cluster_detection import detect_cluster
from ddplaunch.cli.job_config_options import build_job_config
from ddplaunch.core import messages
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.messages import JoinDeclined, JoinRefused, Message, NodeHello
from ddplaunch.core.net.coordinator_client import CoordinatorClient
from ddplaunch.core.net.listener import ControlPortListener
from ddplaunch.core.options import DryRun, Nodes, Starting
from ddplaunch.system.network.reserved_port import PortTaken, try_listen
from ddplaunch.system.plan.rendezvous import SOURCE_MISSING, locate_store

DECLINE_TIMEOUT_S = 10.0  # to reach the other nodes: of nodes that start together, some are later
LINGER_S = 1.0  # for the last message to be delivered


def notify_other_nodes(error: UsageError, options: Options, listener_socket: socket.socket | None) -> None:
    """Send this usage error to the other nodes, which end with it; do nothing if stdin is a terminal.

    Return when the other nodes know the error, or after DECLINE_TIMEOUT_S.

    A feature that runs the job in place of this launcher sends it itself. Nodes that were started one by one are not
    notified either, since this one can be started again; unless node 0's port is taken: then all need another port.
    ``listener_socket`` is on the control port, if this node has opened it.
    """
    if options[DryRun].dry_run or os.isatty(0) or load_features().run_instead(options):  # a terminal: srun --pty
        return
    try:
        options, cluster_env = detect_cluster(options)
        nodes = options[Nodes]
        if not isinstance(nodes.node_rank, int) or (cluster_env is None and not isinstance(error, PortTaken)):
            return
        given = (nodes.master_addr, nodes.master_port, options[Starting].init_method)
        address, port = locate_store(*given, nnodes=nodes.nnodes[1], here=None, environ=os.environ)
        job_config = build_job_config(options, address.value, int(port.value), cluster_env)
        if job_config.port is not None and address.source != SOURCE_MISSING:
            declined = JoinDeclined(nodes.node_rank, host_name(), error.message, error.hint, nodes.run_id)
            if nodes.node_rank:
                _notify_node_zero(job_config, declined)
            else:
                _notify_other_nodes(job_config, declined, listener_socket)
    except UsageError:
        pass  # the first error has been printed


def _notify_node_zero(config: JobConfig, declined: JoinDeclined) -> None:
    loop = EventLoop()
    replies: list[Message] = []

    def on_message(message: Message) -> None:
        if isinstance(message, messages.EndJob):
            replies.append(message)

    hurried = config.options.with_values(OptionSource.DEFAULT, {"join_timeout": DECLINE_TIMEOUT_S})
    client = CoordinatorClient(loop, replace(config, options=hurried), declined, on_message)
    client.start()
    _run_until(loop, DECLINE_TIMEOUT_S + 1, lambda: bool(replies))
    client.close()
    _run_until(loop, LINGER_S, lambda: client.is_closed)


def _notify_other_nodes(config: JobConfig, declined: JoinDeclined, listener_socket: socket.socket | None) -> None:
    assert config.port is not None
    try:
        listener_socket = listener_socket or try_listen(config.port)
    except UsageError:
        return
    if listener_socket is None:
        return  # another process listens there, which may be node 0
    loop = EventLoop()
    refuser = _JoinRefuser(loop, config, declined, listener_socket)
    _run_until(loop, DECLINE_TIMEOUT_S, lambda: len(refuser.informed) >= config.max_nodes - 1)
    _run_until(loop, LINGER_S, lambda: not any(connection.is_open for connection in refuser.informed))
    for connection in refuser.listener.close():
        connection.close()


class _JoinRefuser:
    """Sends the usage error of this node to every node that joins, so that the other node ends too."""

    def __init__(
        self, loop: EventLoop, config: JobConfig, declined: JoinDeclined, listener_socket: socket.socket
    ) -> None:
        self._refusal = JoinRefused(declined.text, declined.hint)
        self.informed: list[Connection[Message]] = []
        self.listener = ControlPortListener(loop, listener_socket, config, 1, self)

    def on_peer(self, connection: Connection[Message], hello: NodeHello | JoinDeclined, proof: str | None) -> None:
        self.informed.append(connection)
        self.listener.refuse(connection, self._refusal)


def _run_until(loop: EventLoop, seconds: float, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    loop.call_later(seconds, lambda: None)
    while not done() and time.monotonic() < deadline:
        loop.run_once()
