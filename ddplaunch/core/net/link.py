"""The control link: this node's connection to the coordinator (in-process on node 0), its hello, and its plan."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Mapping
from functools import partial

from ddplaunch.base.errors import UsageError, host_name
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.messages import Message, NodeHello, StartAttempt
from ddplaunch.core.net.coordinator_client import CoordinatorClient
from ddplaunch.core.net.coordinator_server import CoordinatorServer
from ddplaunch.core.options import Nodes, Stopping
from ddplaunch.system.network.addresses import is_local_address
from ddplaunch.system.network.reserved_port import ReservedPort, try_listen
from ddplaunch.system.plan.node_spec import make_node_spec, with_all_nodes, with_assignment
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.target.target import Target, TargetKind
from ddplaunch.system.target.versions import Versions, read_versions

MAX_HASHED_BYTES = 64 << 20
"""The part of a target file that nodes compare; the rest of a larger one is not compared."""


def make_link(
    loop: EventLoop,
    plan: Plan,
    config: JobConfig,
    on_message: Callable[[Message], None],
    listener_socket: socket.socket | None = None,
) -> CoordinatorServer | CoordinatorClient:
    """Create the link: the coordinator server on node 0, the client elsewhere.

    ``on_message`` is called by the loop with each message to this node, never from within a call of the link.
    ``listener_socket`` listens on the control port, if that was opened before.
    Raises UsageError if the control port is taken.
    """

    def post_message(message: Message) -> None:
        loop.call_soon(partial(on_message, message))

    if config.port is None:
        restarts = config.options[Stopping].max_restarts
        hello = NodeHello(make_node_spec(plan), config.nnodes_text, None, "", None, restarts, Versions(""), ())
        return CoordinatorServer(loop, config, hello, plan.run_id, post_message)
    hello = build_hello(plan, config)
    if plan.node_rank:
        return CoordinatorClient(loop, config, hello, post_message)
    return CoordinatorServer(
        loop, config, hello, plan.run_id, post_message, listener_socket or _listen_on_control_port(config)
    )


def build_hello(plan: Plan, config: JobConfig) -> NodeHello:
    """Build the hello of this node."""
    return NodeHello(
        node_spec=make_node_spec(plan),
        nnodes=config.nnodes_text,
        run_id=config.options[Nodes].run_id,
        target=_replace_unprintable(plan.target.text),
        fingerprint=_compute_fingerprint(plan.target),
        max_restarts=config.options[Stopping].max_restarts,
        versions=read_versions(torch=plan.target.kind is not TargetKind.PROGRAM),
        gpus=tuple(dict.fromkeys(map(_replace_unprintable, plan.gpus))),
        has_node_rank=plan.has_node_rank,
        domain=plan.domain,
    )


def _replace_unprintable(text: str) -> str:
    """Replace characters that may not be sent or printed by "?"."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _compute_fingerprint(target: Target) -> str | None:
    path = target.source or target.path
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read(MAX_HASHED_BYTES)).hexdigest()[:12]
    except OSError:
        return None


def _listen_on_control_port(config: JobConfig) -> socket.socket:
    assert config.port is not None
    port = ReservedPort(config.address, config.port, nnodes=config.max_nodes, option="--control-port")
    listener_socket = port.listen().dup()
    port.close()
    return listener_socket


def listen_on_node_zero(plan: Plan, config: JobConfig) -> socket.socket | None:
    """Listen on the control port before anything else; None if the job has no control port, or this is not node 0.

    With --node-rank auto, node 0 is the first launcher on the machine that has node 0's address.
    Raises UsageError if the master port or the control port is taken.
    """
    if config.port is None or (plan.has_node_rank and plan.node_rank):
        return None
    if not plan.has_node_rank:
        try:
            is_local = config.address == host_name() or is_local_address(config.address)
        except UsageError:  # the name may resolve later, and is waited for
            is_local = False
        return try_listen(config.port) if is_local else None
    if plan.holds_store:  # if both are taken, report the master port
        ReservedPort(plan.master_addr, plan.master_port, nnodes=plan.nnodes).close()
    return _listen_on_control_port(config)


def make_attempt_plan(
    plan: Plan, start: StartAttempt, config: JobConfig, environ: Mapping[str, str], extra: Mapping[str, str]
) -> Plan:
    """Return ``plan`` with this attempt's node assignment; on node 0 also with all other nodes.

    GLOO_SOCKET_IFNAME is set, unless it is in ``environ``, to the interface of the route to node 0: gloo otherwise uses
    the address of the host's own name, which Debian's installer sets to 127.0.1.1. NCCL chooses well by itself.
    ``extra``: more variables; those in ``environ`` win.
    """
    if start.assignment is None:
        return plan
    variables = dict(extra)
    if start.interface:
        variables["GLOO_SOCKET_IFNAME"] = start.interface
    if interface := config.options[Nodes].interface:
        variables["NCCL_SOCKET_IFNAME"] = f"={interface}"  # without "=", NCCL takes it for a prefix
    defaults = {name: value for name, value in variables.items() if not environ.get(name)}
    assigned = with_assignment(plan, start.assignment, start.run_id, start.address or plan.master_addr, defaults)
    return with_all_nodes(assigned, start.node_specs) if start.node_specs else assigned
