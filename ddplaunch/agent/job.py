"""What the zygote and the worker in it are told of one rank: the job, a dict of plain values that travels as JSON."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddplaunch.output.screen import Screen
from ddplaunch.plan.layout import Rank
from ddplaunch.plan.plan import Plan
from ddplaunch.target.target import Kind

if TYPE_CHECKING:
    from ddplaunch.rank.messages import Facts, Job, Program, Python

OURS_ALONE = frozenset({"DDPLAUNCH_TOKEN", "DDPLAUNCH_REQUEUE_FILE", "DDPLAUNCH_OVER_SSH"})
"""Variables of the launcher that no rank gets."""


def shielded(warning: int | None) -> list[int]:
    """The scheduler's warning, which may come to every process of ours; but SIGTERM is how ranks are stopped too."""
    return [] if warning is None or warning in (signal.SIGTERM, signal.SIGHUP) else [warning]


def title(plan: Plan) -> str:
    """The command line that ``ps`` shows for each rank."""
    return " ".join(plan.target.argv)


def describe(
    plan: Plan,
    rank: Rank,
    attempt: int,
    *,
    error_file: str | None,
    screen: Screen,
    variables: Mapping[str, str],
) -> Job:
    """Describe one rank to the zygote and to ``rank/worker.py`` in it.

    Args:
        error_file: where its exception is to be recorded, for us and for torchelastic's ``@record``.
        screen: in a terminal of any kind each line of a rank comes at once.
        variables: what it has beside those of the plan.
    """
    target = plan.target
    environment = {**plan.environment(rank, attempt), **variables}
    if error_file:
        environment["TORCHELASTIC_ERROR_FILE"] = error_file
    if screen.terminal:
        environment["DDPLAUNCH_TERMINAL"] = "1"  # for ddplaunch.runtime.progress: our pipes are no terminal
    typed, path, args = target.typed, target.path or "", list(plan.arguments(rank))
    cpus = list(rank.cpus) if rank.cpus else None
    if target.kind is Kind.PROGRAM:
        program: Program = {
            "rank": rank.rank,
            "kind": "program",
            "typed": typed,
            "path": path,
            "args": args,
            "env": environment,
            "cpus": cpus,
        }
        return program
    facts: Facts = {
        "rank": rank.rank,
        "local_rank": int(environment["LOCAL_RANK"]),
        "node_rank": rank.node_rank,
        "nnodes": plan.nnodes,
        "world_size": plan.world_size,
        "local_world_size": plan.nodes[rank.node_rank].local_world_size,
        "device": environment["DDPLAUNCH_DEVICE"],
    }
    python: Python = {
        "rank": rank.rank,
        "kind": target.kind.value,
        "typed": typed,
        "path": path,
        "module": target.module or "",
        "function": target.function or "",
        "args": args,
        "env": environment,
        "cpus": cpus,
        "first": target.first or "",
        "facts": facts,
        "first_here": rank.local_rank == 0,
        "backend": plan.backend,
        "init_method": plan.init_method,
        "store": (plan.master_addr, plan.master_port),
        "error_file": error_file,
        "line_buffered": screen.by_lines,
        "title": title(plan),
    }
    return python
