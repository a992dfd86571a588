"""The job sides of all features in one job, isolated from the job and from each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from ddplaunch.base.frames import ProtocolError
from ddplaunch.core.deadlines import Deadline, Deadlines, Now
from ddplaunch.core.failures import FailureReport, JobResult, RankFailure
from ddplaunch.core.feature import Feature, JobContext, JobSide
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.isolation import Isolation
from ddplaunch.core.job.job_attempt import JobAttempt, StopCause
from ddplaunch.core.job.job_deadlines import FeatureDeadline
from ddplaunch.core.job.node_table import NodeTable
from ddplaunch.core.job.rpc import Rpc
from ddplaunch.core.job.time_limits import TimeLimits
from ddplaunch.core.machine import Command, CommandCollector, Send
from ddplaunch.core.messages import CheckRequest, Message, NoteMessage

NamedFeatures = Iterable[tuple[str, Feature]]


class _NamedSide(NamedTuple):
    name: str
    isolation: Isolation
    side: JobSide


class _SideContext(JobContext):
    def __init__(self, name: str, run_id: str, sides: JobSides) -> None:
        """``name``: of the feature; ``sides`` collects what it requests."""
        self.nodes, self.limits = sides.nodes, sides.limits
        self.config, self.options, self.run_id = self.nodes.config, self.nodes.config.options, run_id
        self.isolation = Isolation(f"the feature {name}", lambda text: self.send(0, NoteMessage(text)))
        self._name, self._sides = name, sides

    @property
    def now(self) -> Now:
        return self._sides.now

    def send(self, node_rank: int, message: Message) -> None:
        self._sides.request(Send(node_rank, message))

    def send_to_all(self, message: Message) -> None:
        self._sides.request(*self.nodes.to_all(message))

    def report_stall(self, since: float, text: str) -> None:
        self._sides.request(*self.limits.on_stall(since, text))

    def set_deadline(self, name: str, seconds: float) -> None:
        self._sides.deadlines.set(FeatureDeadline(self._name, name), self.now.mono + seconds)

    def cancel_deadlines(self, *names: str) -> None:
        self._sides.deadlines.cancel(*(FeatureDeadline(self._name, name) for name in names))

    def gather(self, kind: str, request: object, on_done: Callable[[Any], None]) -> None:
        on_reply = _ignore_none(self.isolation.guard(on_done))
        self._sides.request(*self._sides.rpc.gather(kind, request, on_reply, self.now))

    def stop_attempt(self, cause: StopCause) -> None:
        self._sides.requested_stops.append(cause)

    def allow_end(self) -> None:
        self._sides.requested_stops.append(None)


class JobSides(CommandCollector):
    """Makes and calls the sides of all features; a side that raises is reported once, and the job continues.

    The commands that they request are collected until ``take_commands``, which is called after each hook.
    """

    def __init__(
        self,
        run_id: str,
        nodes: NodeTable,
        deadlines: Deadlines[Deadline],
        limits: TimeLimits,
        rpc: Rpc,
        features: NamedFeatures | None = None,
    ) -> None:
        """``features``: with their names; None for all."""
        super().__init__()
        self.nodes, self.deadlines, self.limits, self.rpc = nodes, deadlines, limits, rpc
        self.now = Now(0.0, 0.0)  # of the event that is being handled
        self._sides: list[_NamedSide] = []
        self.requested_stops: deque[StopCause | None] = deque()  # what is to stop the ranks; None: the job may end now
        for name, feature in load_features() if features is None else features:
            context = _SideContext(name, run_id, self)
            context.isolation.on_error = context.allow_end
            if (side := context.isolation.call(feature.make_job_side, context)) is not None:
                self._sides.append(_NamedSide(name, context.isolation, side))

    def request(self, *commands: Command) -> None:
        """Add commands that a side requests, for ``take_commands``."""
        self._do(*commands)

    def on_deadline(self, deadline: FeatureDeadline) -> None:
        """Pass a deadline of a feature on to its side."""
        for name, isolation, side in self._sides:
            if name == deadline.feature:
                isolation.call(side.on_deadline, deadline.name)

    def _replies(self, hook: str, *arguments: object) -> Iterator[Any]:
        """Call a hook of each side; yield the results that are not None."""
        for _, isolation, side in self._sides:
            if (reply := isolation.call(getattr(side, hook), *arguments)) is not None:
                yield reply

    def _call(self, hook: str, *arguments: object) -> None:
        for _ in self._replies(hook, *arguments):
            pass

    def on_message(self, node: int, message: Message) -> None:
        """Pass a node's message on; ProtocolError if the node cannot have sent it, which disables no side."""
        for _, isolation, side in self._sides:
            if error := isolation.call(_find_protocol_error, side, node, message):
                raise error

    def before_start(self, attempt: int) -> list[CheckRequest]:
        """Return the check requests that the nodes get before the attempt, one after the other."""
        return [*self._replies("before_start", attempt)]

    def holds_end(self, attempt: JobAttempt) -> bool:
        """Whether the job goes on although no rank is left."""
        return any(self._replies("holds_end")) if attempt.is_clean else attempt.awaits_program

    def holds_stop(self, signal: int) -> bool:
        """Whether the job goes on although all ranks were stopped."""
        return any(self._replies("holds_stop", signal))

    def awaits_program(self, attempt: JobAttempt, failure: RankFailure) -> bool:
        """Whether a rank may have failed because another program did; the job then waits a moment for that failure."""
        explained = any(self._replies("may_explain", failure))
        attempt.awaits_program |= explained and len(attempt.failures) == 1
        return explained

    def on_node_lost(self, node: int, text: str) -> None:
        self._call("on_node_lost", node, text)

    def on_attempt_start(self, attempt: int) -> None:
        self._call("on_attempt_start", attempt)

    def before_stop(self, attempt: JobAttempt) -> bool:
        """Send the sides' requests before a stop, one per side and attempt; return whether replies are awaited."""
        if not attempt.sides_to_reply and not attempt.stopping_to_change_nodes:
            for name, isolation, side in self._sides:
                call = isolation.call(side.before_stop, attempt)
                if call is not None and name not in attempt.asked_sides:
                    attempt.asked_sides.add(name)
                    attempt.sides_to_reply.add(name)
                    handler = _ignore_none(isolation.guard(side.on_stop_reply))
                    on_reply = partial(self._on_stop_reply, attempt, name, handler)
                    commands = isolation.call(
                        self.rpc.gather, call.kind, call.request, on_reply, self.now, call.timeout_s
                    )
                    self._do(*(commands or ()))
                    if isolation.failed:
                        attempt.sides_to_reply.discard(name)
        return bool(attempt.sides_to_reply)

    def _on_stop_reply(self, attempt: JobAttempt, name: str, on_reply: Callable[[Any], None], reply: Any) -> None:
        attempt.sides_to_reply.discard(name)
        on_reply(reply)

    def explain_failures(self, attempt: JobAttempt) -> FailureReport | None:
        """Return the failure report; if the first failure is a secondary one, a side may add which rank caused it."""
        report = attempt.failure_report
        if report is None or not report.first.is_secondary or (attempt.stop_cause and attempt.stop_cause.failure):
            return report
        for _, isolation, side in self._sides:
            report = isolation.call(side.blame, report, (*attempt.failures.values(),)) or report
        return report

    def remark(self, *, time_limit: bool) -> str:
        """Join the remarks of all sides; "" without any."""
        remarks = (isolation.call(partial(side.remark, time_limit=time_limit)) for _, isolation, side in self._sides)
        return "; ".join(filter(None, remarks))

    def on_job_end(self, result: JobResult) -> None:
        """Called when the job ends; sides are not called after that."""
        self._call("on_job_end", result)
        self._sides.clear()


def _ignore_none(handler: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap a handler of replies to ignore None, which it gets if the code of the request's kind has raised."""
    return lambda reply: None if reply is None else handler(reply)


def _find_protocol_error(side: JobSide, node: int, message: Any) -> ProtocolError | None:
    """Forward a message from a node to a feature's job side; return the ProtocolError that the side raises, or None."""
    try:
        side.on_message(node, message)
    except ProtocolError as error:
        return error
    return None
