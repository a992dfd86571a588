"""This node's way to the other nodes of its job, whichever node it is, and its plan once it is one of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from functools import partial

from ddplaunch import TYPE_CHECKING
from ddplaunch.control.hello import build_hello
from ddplaunch.control.messages import Message, NodeHello, StartAttempt, Versions
from ddplaunch.control.node_zero import CoordinatorServer
from ddplaunch.control.port import ReservedPort, try_listen
from ddplaunch.control.route import (
    Unresolvable,
    check_interface,
    check_local_address,
    is_local_address,
    list_reachable_addresses,
)
from ddplaunch.control.rules import JobConfig
from ddplaunch.errors import EXIT_UNAVAILABLE, LaunchError, UsageError, host_name
from ddplaunch.loop import EventLoop
from ddplaunch.plan.plan import Plan
from ddplaunch.plan.share import make_node_spec, with_all_nodes, with_assignment

if TYPE_CHECKING:
    from ddplaunch.control.member import CoordinatorClient

_NAME_RETRY_S = 1.0  # seconds between two look-ups of node 0's own name


def make_link(
    loop: EventLoop,
    plan: Plan,
    config: JobConfig,
    on_message: Callable[[Message], None],
    listener_socket: socket.socket | None = None,
) -> CoordinatorServer | CoordinatorClient:
    """Choose and prepare the link, which takes what this node says and hears the job's orders for it.

    ``on_message`` is called by the loop with each message to this node, never from within a call of the link; ``listener_socket``
    is on the control port, where that was claimed before.

    Raises:
        UsageError: the control port is taken.
    """

    def post(message: Message) -> None:
        loop.call_soon(partial(on_message, message))

    if config.port is None:
        alone = NodeHello(
            make_node_spec(plan), config.nnodes_text, None, "", None, config.max_restarts, Versions(""), ()
        )
        return CoordinatorServer(loop, config, alone, plan.run_id, post)
    hello = build_hello(plan, config)
    if plan.node_rank:
        from ddplaunch.control.member import CoordinatorClient

        return CoordinatorClient(loop, config, hello, post)
    return CoordinatorServer(loop, config, hello, plan.run_id, post, listener_socket or _listen_on_control_port(config))


def _listen_on_control_port(rules: JobConfig) -> socket.socket:
    assert rules.port is not None
    port = ReservedPort(rules.address, rules.port, nnodes=rules.max_nodes, option="--control-port")
    listening = port.listen().dup()
    port.close()
    return listening


def listen_on_node_zero(plan: Plan, rules: JobConfig) -> socket.socket | None:
    """Listen on the control port, as the first thing that the job does; None if there is none, or this is not node 0.

    Where the nodes have no ranks yet, node 0 is the first on the machine that has its address.

    Raises:
        UsageError: the master port or the control port is taken.
    """
    if rules.port is None or (plan.has_node_rank and plan.node_rank):
        return None
    if not plan.has_node_rank:
        try:
            ours = rules.address == host_name() or is_local_address(rules.address)
        except UsageError:  # the name may come later, and is waited for
            ours = False
        return try_listen(rules.port) if ours else None
    if plan.hosts_store:  # where both are taken, the master port is the one to name
        ReservedPort(plan.master_addr, plan.master_port, nnodes=plan.nnodes).close()
    return _listen_on_control_port(rules)


def make_attempt_plan(
    plan: Plan, start: StartAttempt, rules: JobConfig, environ: Mapping[str, str], extra: Mapping[str, str]
) -> Plan:
    """Return ``plan``, made when this node knew only itself, as the ordered attempt has it; node 0's has all nodes.

    GLOO_SOCKET_IFNAME is set, unless it is in ``environ``, to the interface that leads to node 0: gloo else takes the
    address of the host's own name, which Debian's installer puts at 127.0.1.1. NCCL chooses well by itself.
    ``extra`` are further variables that give way to ``environ``.
    """
    if start.assignment is None:
        return plan
    variables = dict(extra)
    if start.interface:
        variables["GLOO_SOCKET_IFNAME"] = start.interface
    if rules.interface:
        variables["NCCL_SOCKET_IFNAME"] = rules.interface
    unset = {name: value for name, value in variables.items() if not environ.get(name)}
    placed = with_assignment(plan, start.assignment, start.run_id, start.address or plan.master_addr, unset)
    return with_all_nodes(placed, start.node_specs) if start.node_specs else placed


def check_link(plan: Plan, rules: JobConfig, note: Callable[[str], object]) -> None:
    """Raise a UsageError where this node lacks what it needs for its share, or the rules contradict the plan.

    On node 0 that includes its own name, which may come late: ``note`` is called once where it is waited for.
    """
    if rules.interface:
        check_interface(rules.interface)
    if plan.nnodes > 1:
        if rules.port is None:
            _check_single_node(plan)
        else:
            _check_joining(rules, plan, note)


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


def _check_joining(rules: JobConfig, plan: Plan, note: Callable[[str], object]) -> None:
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
    if plan.node_rank == 0 and plan.has_node_rank and not rules.address_may_be_unknown:
        _wait_for_name(plan.master_addr, rules.join_timeout, note)


def _wait_for_name(address: str, timeout_s: float, note: Callable[[str], object]) -> None:
    """Check that ``address`` is one of this machine, once it resolves: in Docker compose it may come after us.

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
    exit_code = EXIT_UNAVAILABLE
