"""The failure of a rank that the other ranks waited for, when a time limit stops the attempt."""

from __future__ import annotations

from collections.abc import Collection

from ddplaunch.base.errors import EXIT_TIMEOUT
from ddplaunch.base.text import join_names
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.feature import JobContext
from ddplaunch.observe.diagnosis.inspection import Inspection


def make_failure(
    context: JobContext,
    attempt: int,
    inspection: Inspection,
    number: int,
    message: str,
    trace: str,
    hint: str | None = None,
) -> RankFailure:
    """Build the failure of rank ``number``; its exit code is that of a timeout."""
    rank = next(rank for rank in inspection.ranks if rank.rank == number)
    first = next((node.ranks.start for node in context.nodes.values() if number in node.ranks), number)
    return RankFailure(
        rank=number,
        local_rank=number - first,
        host=rank.host,
        pid=rank.pid,
        attempt=attempt,
        exit_code=EXIT_TIMEOUT,
        signal=None,
        message=message,
        traceback=f"it was at\n{trace}" if trace else None,
        moment=context.now.wall,
        hint=hint,
    )


def format_hosts(context: JobContext, inspection: Inspection, ranks: Collection[int]) -> str:
    """Format the hosts of these ranks: " (on n1)", " (on n1, n2)"; "" in a job that can have one node only."""
    hosts = sorted({rank.host for rank in inspection.ranks if rank.rank in ranks and rank.host})
    return f" (on {join_names(hosts)})" if hosts and context.config.max_nodes > 1 else ""
