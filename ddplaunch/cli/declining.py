"""A command that is refused on one node of several which were started together: the others are to hear of it."""

from __future__ import annotations

import os
from typing import Any

from ddplaunch.cli.surroundings import look_around
from ddplaunch.control.rules import Rules
from ddplaunch.errors import UsageError


def tell(error: UsageError, flags: dict[str, Any]) -> None:
    """Let the other nodes end with this error too, where nobody sits at this one to type the command again.

    Over SSH the hosts' own connections do so, and a person who started each node will start this one once more.
    """
    found = _found(flags)
    if found is None:
        return
    from ddplaunch.control.decline import decline

    rules, node_rank = found
    try:
        decline(rules, node_rank, os.uname().nodename, error, flags.get("listening"))
    except UsageError:
        pass  # the first error is the one to mend


def _found(flags: dict[str, Any]) -> tuple[Rules, int] | None:
    """The job as far as its surroundings describe it, and this node's rank; None where they do not."""
    if flags["dry_run"] or flags["hosts"] or flags["hostfile"] or os.isatty(0):  # as in a shell of srun --pty
        return None
    from ddplaunch.plan.rendezvous import MISSING, locate

    flags = dict(flags)
    try:
        if "surroundings" not in flags:  # it was refused before they were looked at
            flags["surroundings"] = look_around(flags)
            flags["min_nodes"], flags["nnodes"] = flags["nnodes"]
        nnodes, node_rank = flags["nnodes"], flags["node_rank"]
        if flags["surroundings"] is None or flags["control"] == "none" or nnodes == 1 or not isinstance(node_rank, int):
            return None
        typed = flags["master_addr"], flags["master_port"], flags["init_method"]
        address, port = locate(*typed, nnodes=nnodes, here=None, environ=os.environ)
    except UsageError:
        return None
    if address.source == MISSING:
        return None
    named = {name: flags[name] for name in Rules.__dataclass_fields__ if name in flags}
    control = flags["control_port"] or int(port.value) + 1
    if control > 65535:  # which is refused in its place
        return None
    return Rules(**{**named, "max_nodes": nnodes, "address": address.value, "port": control}), node_rank
