"""The command for each of the other nodes, as the dry run prints it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from ddplaunch.plan.plan import Plan
from ddplaunch.target.target import Kind


def command_for(plan: Plan, node_rank: int, options: Iterable[str]) -> str:
    """Write the command that starts the share of ``node_rank``, with every value that must agree spelled out.

    Args:
        options: the options typed here that say something else (not those about nodes, addresses and counts).
    """
    nnodes = f"{plan.min_nodes}:{plan.nnodes}" if plan.min_nodes else str(plan.nnodes)
    words = ["ddplaunch", "run", "--nnodes", nnodes, "--node-rank", str(node_rank) if plan.numbered else "auto"]
    words += ["--master-addr", plan.master_addr, "--master-port", str(plan.master_port)]
    words += ["--nproc", plan.counts, *options]
    if plan.target.kind in (Kind.MODULE, Kind.PROGRAM):
        words.append("-m" if plan.target.kind is Kind.MODULE else "--no-python")
    typed, args = plan.target.typed, plan.target.args
    if typed.startswith("-"):
        words += ["--", typed, *args]
    else:
        words += [typed, *(("--", *args) if args else ())]
    return shlex.join(words)
