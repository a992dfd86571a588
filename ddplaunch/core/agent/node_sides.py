"""The node sides of all features in one launcher, isolated from the job and from each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.events import Event
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.feature import Feature, FeatureContext, NodeSide, RankSide
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.isolation import IsolatedLoop
from ddplaunch.core.messages import CheckRequest, Message
from ddplaunch.core.rank.zygote_messages import RankJob
from ddplaunch.system.plan.rank_layout import Rank

T = TypeVar("T")

HOOKS = (
    "observe",
    "on_message",
    "on_check",
    "on_attempt_start",
    "make_rank_side",
    "complete_job",
    "on_output",
    "explain_failure",
    "find_exception",
    "on_crash",
    "on_resume",
    "on_inspect_key",
    "on_signal_after_end",
)
"""The hooks that are called on all sides that override them."""


class NodeSides:
    """Makes and calls the sides of all features; a side that raises is reported once, and the job continues."""

    def __init__(self, loop: EventLoop, report: Callable[[str], object]) -> None:
        """``report`` gets messages on bugs."""
        self._loop, self._report = loop, report
        self._sides: list[tuple[IsolatedLoop, NodeSide]] = []
        self._guarded: dict[str, list[Callable[..., Any]]] = {hook: [] for hook in HOOKS}

    def make(self, make_context: Callable[[IsolatedLoop, tuple[NodeSide, ...]], FeatureContext]) -> None:
        """Make the sides of all features; ``make_context`` gets the loop of a feature and the sides made before."""
        for name, feature in load_features():
            context = make_context(self._make_loop(name), tuple(side for _, side in self._sides))
            context.loop.guard(self._add)(feature, context)

    def _add(self, feature: Feature, context: FeatureContext) -> None:
        if (side := feature.make_node_side(context)) is not None:
            self._sides.append((context.loop, side))
            for hook, guarded in self._guarded.items():
                if getattr(type(side), hook) is not getattr(NodeSide, hook):  # else the side does not override it
                    guarded.append(context.loop.guard(getattr(side, hook)))

    def find(self, kind: type[T]) -> T | None:
        """Return the side of a feature; None if the job has none."""
        return next((side for _, side in self._sides if isinstance(side, kind)), None)

    def _make_loop(self, name: str) -> IsolatedLoop:
        return IsolatedLoop(self._loop, f"the feature {name}", self._report)

    def _call(self, hook: str, *arguments: object) -> list[Any]:
        """Call a hook of all sides and return the results; None for a side that has raised."""
        return [guarded(*arguments) for guarded in self._guarded[hook]]

    def observe(self, event: Event) -> None:
        self._call("observe", event)

    def on_message(self, message: Message) -> None:
        self._call("on_message", message)

    def on_check(self, request: CheckRequest) -> bool:
        """Call the sides to check this node; return whether one of them sends node 0 the reply."""
        return any(self._call("on_check", request))

    def on_attempt_start(self, ranks: NodeRanks) -> None:
        self._call("on_attempt_start", ranks)

    def make_rank_sides(self, ranks: NodeRanks, rank: Rank) -> list[RankSide]:
        """Return the rank side of each feature that has one: the object that runs in the process of this rank."""
        return [side for side in self._call("make_rank_side", ranks, rank) if side is not None]

    def complete_job(self, job: RankJob) -> RankJob:
        """Let each side change the job of a rank; return the job."""
        self._call("complete_job", job)
        return job

    def on_output(self, rank: int) -> None:
        self._call("on_output", rank)

    def explain_failure(self, failure: RankFailure, peak_bytes: int) -> str | None:
        """Return the first hint for a rank's failure."""
        return next(filter(None, self._call("explain_failure", failure, peak_bytes)), None)

    def find_exception(self, rank: int) -> tuple[str, str] | None:
        """Return message and traceback of an exception that will end this rank, from the first side that knows one."""
        return next(filter(None, self._call("find_exception", rank)), None)

    def on_crash(self, rank: int) -> bool:
        """Return whether a side calls ``NodeRanks.release_crashed`` later, for a rank whose native code failed."""
        return any(self._call("on_crash", rank))

    def on_resume(self) -> None:
        self._call("on_resume")

    def on_inspect_key(self) -> None:
        self._call("on_inspect_key")

    def on_signal_after_end(self) -> bool:
        return any(self._call("on_signal_after_end"))

    def close(self) -> None:
        """Close all sides, also those that have raised."""
        for loop, side in self._sides:
            _call_at_end(loop, side.close)

    def finish(self) -> None:
        """Wait for all sides, also for those that have raised."""
        for loop, side in self._sides:
            _call_at_end(loop, side.finish)


def _call_at_end(loop: IsolatedLoop, function: Callable[[], object]) -> None:
    """Call ``close`` or ``finish`` of a side. If the side has raised before, ignore a new exception."""
    if not loop.failed:
        loop.call(function)
    else:
        with suppress(Exception):
            function()
