"""What an order to start means for this node's plan: which ranks are here, where node 0 is, through which interface."""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.control.messages import Start
from ddplaunch.control.rules import Rules
from ddplaunch.plan.plan import Plan
from ddplaunch.plan.share import with_others, with_place


def attempt_plan(plan: Plan, order: Start, rules: Rules, environ: Mapping[str, str], extra: Mapping[str, str]) -> Plan:
    """Return ``plan``, made when this node knew only itself, as the ordered attempt has it; node 0's has all nodes.

    GLOO_SOCKET_IFNAME is set, unless it is in ``environ``, to the interface that leads to node 0: gloo else takes the
    address of the host's own name, which Debian's installer puts at 127.0.1.1. NCCL chooses well by itself.
    ``extra`` are further variables that give way to ``environ``.
    """
    if order.place is None:
        return plan
    variables = dict(extra)
    if order.interface:
        variables["GLOO_SOCKET_IFNAME"] = order.interface
    if rules.interface:
        variables["NCCL_SOCKET_IFNAME"] = rules.interface
    unset = {name: value for name, value in variables.items() if not environ.get(name)}
    placed = with_place(plan, order.place, order.run_id, order.address or plan.master_addr, unset)
    return with_others(placed, order.shares) if order.shares else placed
