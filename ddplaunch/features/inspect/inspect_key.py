"""Ctrl-\\ in the launcher's terminal: shows what each rank does and waits for, as ``ddplaunch stacks`` does."""

from __future__ import annotations

from ddplaunch.core.feature import FeatureContext, NodeSide, RankSide
from ddplaunch.core.node.node_ranks import NodeRanks
from ddplaunch.core.output.log_message import LogMessage, MessageKind
from ddplaunch.features.inspect.diagnosis.inspection import Detail, Inspection
from ddplaunch.features.inspect.rpc import inspect_job
from ddplaunch.system.plan.rank_layout import Rank

LONG_ATTEMPT_S = 300.0
"""A rank that succeeds this long after its first process group writes the arrivals at its last collectives."""


class InspectOnKey(NodeSide):
    """Inspects the job when the key is pressed, and shows the result on the screen."""

    def __init__(self, context: FeatureContext) -> None:
        self._context = context

    def make_rank_side(self, ranks: NodeRanks, rank: Rank) -> RankSide | None:
        if not self._context.config.inspect:
            return None
        files = {
            "in_flight_file": ranks.rank_file_path(rank.rank, "json.in-flight") or "",
            "trace_file": ranks.rank_file_path(rank.rank, "trace.json") or "",
        }
        return RankSide("features/inspect/rank/inspect_side", {**files, "trace_min_age_s": LONG_ATTEMPT_S})

    def on_inspect_key(self) -> None:
        context = self._context
        context.screen.show_note("inspecting the ranks; press Ctrl-\\ again to stop the job")
        inspect_job(context.job.rpc, Detail.WAITS, context.loop.guard(self._show))

    def _show(self, inspection: Inspection) -> None:
        import click

        from ddplaunch.features.inspect.diagnosis.wait_sentences import describe_waits
        from ddplaunch.features.inspect.stacks_text import render_stacks, stacks_to_json

        page = render_stacks(inspection)
        text, fields = "\n".join(describe_waits(inspection)), {"stacks": stacks_to_json(inspection)}
        lines = page if self._context.config.colour else click.unstyle(page)
        self._context.screen.show_message(LogMessage(MessageKind.STACKS, text, fields, lines))
