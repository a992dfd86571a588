"""The control link: this node's connection to the coordinator (in-process on node 0), and its plan for an attempt."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from functools import partial

from ddplaunch.base.errors import EXIT_UNAVAILABLE, LaunchError, UsageError, host_name
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.messages import Message, NodeHello, StartAttempt, Versions
from ddplaunch.core.net.coordinator_client import CoordinatorClient
from ddplaunch.core.net.coordinator_server import CoordinatorServer
from ddplaunch.core.net.hello import build_hello
from ddplaunch.system.network.addresses import (
    Unresolvable,
    check_interface,
    check_local_address,
    is_local_address,
    list_reachable_addresses,
)
from ddplaunch.system.network.reserved_port import ReservedPort, try_listen
from ddplaunch.system.plan.node_spec import make_node_spec, with_all_nodes, with_assignment
from ddplaunch.system.plan.plan import Plan

_NAME_RETRY_S = 1.0  # between two look-ups of node 0's own name


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

    Raises:
        UsageError: the control port is taken.
    """

    def post_message(message: Message) -> None:
        loop.call_soon(partial(on_message, message))

    if config.port is None:
        hello = NodeHello(
            make_node_spec(plan), config.nnodes_text, None, "", None, config.max_restarts, Versions(""), ()
        )
        return CoordinatorServer(loop, config, hello, plan.run_id, post_message)
    hello = build_hello(plan, config)
    if plan.node_rank:
        return CoordinatorClient(loop, config, hello, post_message)
    return CoordinatorServer(
        loop, config, hello, plan.run_id, post_message, listener_socket or _listen_on_control_port(config)
    )


def _listen_on_control_port(config: JobConfig) -> socket.socket:
    assert config.port is not None
    port = ReservedPort(config.address, config.port, nnodes=config.max_nodes, option="--control-port")
    listener_socket = port.listen().dup()
    port.close()
    return listener_socket


def listen_on_node_zero(plan: Plan, config: JobConfig) -> socket.socket | None:
    """Listen on the control port before anything else; None if there is none, or this is not node 0.

    With --node-rank auto, node 0 is the first launcher on the machine that has node 0's address.

    Raises:
        UsageError: the master port or the control port is taken.
    """
    if config.port is None or (plan.has_node_rank and plan.node_rank):
        return None
    if not plan.has_node_rank:
        try:
            is_local = config.address == host_name() or is_local_address(config.address)
        except UsageError:  # the name may resolve later, and is waited for
            is_local = False
        return try_listen(config.port) if is_local else None
    if plan.hosts_store:  # if both are taken, report the master port
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
    if config.interface:
        variables["NCCL_SOCKET_IFNAME"] = config.interface
    defaults = {name: value for name, value in variables.items() if not environ.get(name)}
    assigned = with_assignment(plan, start.assignment, start.run_id, start.address or plan.master_addr, defaults)
    return with_all_nodes(assigned, start.node_specs) if start.node_specs else assigned


def check_link(plan: Plan, config: JobConfig, note: Callable[[str], object]) -> None:
    """Raise UsageError if an option for the nodes is missing, or contradicts the plan or this machine.

    On node 0 its own name must resolve, which may take a while: ``note`` is called once while waiting for it.
    """
    if config.interface:
        check_interface(config.interface)
    if plan.nnodes > 1:
        if config.port is None:
            _check_single_node(plan)
        else:
            _check_joining(config, plan, note)


def _check_single_node(plan: Plan) -> None:
    if plan.missing_options:
        *first, last = plan.missing_options
        names = f"{', '.join(first)} and {last}" if first else last
        raise UsageError(
            f"--control none on {plan.nnodes} nodes needs {names}",
            "ddplaunch run … --dry-run writes the command for each node",
        )
    if plan.max_restarts:
        raise UsageError(
            f"--max-restarts {plan.max_restarts} does not work with --control none: each node would restart alone",
            "leave one of them out",
        )


def _check_joining(config: JobConfig, plan: Plan, note: Callable[[str], object]) -> None:
    others = f"1 to {plan.nnodes - 1}" if plan.nnodes > 2 else "1"
    if "--node-rank" in plan.missing_options:
        rest = f"{others} on the other{'s' * (plan.nnodes > 2)}"
        raise UsageError(
            f"--node-rank is missing: which of the {plan.nnodes} nodes is this?",
            f"--node-rank 0 on the node whose address is --master-addr, {rest}\n"
            "--node-rank auto numbers them as they join",
        )
    if "--master-addr" in plan.missing_options:
        if plan.node_rank:
            raise UsageError(
                f"--master-addr is missing: where is node 0 of these {plan.nnodes} nodes?",
                "`hostname -I` on node 0 shows its addresses; give the same one on every node",
            )
        example = next(list_reachable_addresses(), "10.0.0.1")
        raise UsageError(
            "--master-addr is missing: where do the other nodes reach this one?",
            f"--master-addr {example} on every node; it is an address of this machine",
        )
    if plan.node_rank == 0 and plan.has_node_rank and not config.address_may_be_unknown:
        _wait_for_name(plan.master_addr, config.join_timeout, note)


def _wait_for_name(address: str, timeout_s: float, note: Callable[[str], object]) -> None:
    """Check that ``address`` is one of this machine, once it resolves: Docker compose may add it later.

    Raises:
        NameTimeout: it does not resolve in ``timeout_s`` seconds.
        UsageError: it is another machine's.
    """
    deadline, noted = time.monotonic() + timeout_s, False
    while True:
        try:
            return check_local_address(address)
        except Unresolvable as error:
            if time.monotonic() > deadline:
                message = f"{error.message} in {timeout_s:g} s (--join-timeout)"
                raise NameTimeout(message, error.hint) from None
            if not noted:
                note(f"waiting for node 0's own name: {address} does not resolve yet")
            noted = True
        time.sleep(min(_NAME_RETRY_S, timeout_s))


class NameTimeout(LaunchError):
    """Node 0's own name did not resolve within --join-timeout."""

    exit_code = EXIT_UNAVAILABLE
