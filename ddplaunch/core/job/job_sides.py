"""The job sides of all features in one coordinator, isolated from the job and from each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from ddplaunch.base.event_loop import Callback, Timer
from ddplaunch.base.frames import ProtocolError
from ddplaunch.core.failures import FailureReport, JobResult, RankFailure
from ddplaunch.core.feature import Feature, JobContext, JobSide, load_features
from ddplaunch.core.job.job_attempt import JobAttempt, TimeLimitExpired
from ddplaunch.core.job.node_table import NodeTable
from ddplaunch.core.job.rpc import Rpc
from ddplaunch.core.job.time_limits import TimeLimits
from ddplaunch.core.messages import AttemptMessage, FromNode, NoteMessage
from ddplaunch.core.output.isolation import Isolation, not_isolated
from ddplaunch.core.rpc_kind import GetOffset


class _NamedSide(NamedTuple):
    name: str
    isolation: Isolation
    side: JobSide


class JobSides:
    """Makes the sides, and passes calls on to them; one that raises is reported once, and the job goes on."""

    def __init__(
        self,
        run_id: str,
        nodes: NodeTable,
        limits: TimeLimits,
        rpc: Rpc,
        clock_of: GetOffset,
        stop_attempt: Callable[[TimeLimitExpired], None],
        call_later: Callable[[float, Callback], Timer],
        features: Iterable[tuple[str, Feature]] | None = None,
    ) -> None:
        """``stop_attempt`` stops the ranks, if they run; ``call_later`` is the loop's; ``features``: None for all."""
        self._rpc = rpc
        self._sides: list[_NamedSide] = []
        stop = not_isolated(partial(call_later, 0), stop_attempt)

        def make_context(isolation: Isolation) -> JobContext:
            return JobContext(
                nodes.config,
                nodes.config.options,
                run_id,
                nodes,
                limits,
                clock_of,
                stop,
                lambda seconds, callback: call_later(seconds, isolation.guard(callback)),
                lambda kind, request, on_done: rpc.gather(kind, request, _unless_none(isolation.guard(on_done))),
            )

        for name, feature in load_features() if features is None else features:
            isolation = Isolation(f"the feature {name}", lambda text: nodes.send(0, NoteMessage(text)))
            if (side := isolation.call(feature.make_job_side, make_context(isolation))) is not None:
                self._sides.append(_NamedSide(name, isolation, side))

    def _replies(self, hook: str, *arguments: object) -> Iterator[Any]:
        """Call a hook of each side; yield what they return, without None."""
        for _, isolation, side in self._sides:
            if (reply := isolation.call(getattr(side, hook), *arguments)) is not None:
                yield reply

    def _call(self, hook: str, *arguments: object) -> None:
        for _ in self._replies(hook, *arguments):
            pass

    def on_message(self, node: int, message: FromNode) -> None:
        """Pass a node's message on; ProtocolError if the node cannot have sent it, which disables no side."""
        for _, isolation, side in self._sides:
            if error := isolation.call(_find_protocol_error, side, node, message):
                raise error

    def before_start(self, attempt: int) -> AttemptMessage | None:
        return next(self._replies("before_start", attempt), None)

    def on_attempt_start(self, attempt: int) -> None:
        self._call("on_attempt_start", attempt)

    def before_stop(self, attempt: JobAttempt, on_done: Callable[[], object]) -> bool:
        """Send the requests that precede a stop, one of each side in an attempt, then call ``on_done``.

        Returns False if there is nothing to wait for.
        """
        if not attempt.sides_to_reply and not attempt.stopping_to_change_nodes:
            for name, isolation, side in self._sides:
                call = isolation.call(side.before_stop, attempt)
                if call is not None and name not in attempt.asked_sides:
                    attempt.asked_sides.add(name)
                    attempt.sides_to_reply.add(name)
                    handler = _unless_none(isolation.guard(side.on_stop_reply))
                    on_reply = partial(self._on_stop_reply, attempt, name, handler)
                    isolation.call(self._rpc.gather, call.kind, call.request, on_reply, call.timeout_s)
                    if isolation.failed:
                        attempt.sides_to_reply.discard(name)
        if attempt.sides_to_reply:
            attempt.after_replies.append(on_done)
        return bool(attempt.sides_to_reply)

    def _on_stop_reply(self, attempt: JobAttempt, name: str, on_reply: Callable[[Any], None], reply: Any) -> None:
        attempt.sides_to_reply.discard(name)
        on_reply(reply)
        if not attempt.sides_to_reply:
            for then in attempt.after_replies:
                then()

    def blame(self, report: FailureReport, failures: Sequence[RankFailure]) -> FailureReport:
        for _, isolation, side in self._sides:
            report = isolation.call(side.blame, report, failures) or report
        return report

    def remark(self, *, time_limit: bool) -> str:
        """Join the remarks of all sides; "" without any."""
        remarks = (isolation.call(partial(side.remark, time_limit=time_limit)) for _, isolation, side in self._sides)
        return "; ".join(filter(None, remarks))

    def on_job_end(self, result: JobResult) -> None:
        self._call("on_job_end", result)


def _unless_none(handler: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap a handler of replies: it is not called where the kind of the request has raised."""
    return lambda reply: None if reply is None else handler(reply)


def _find_protocol_error(side: JobSide, node: int, message: FromNode) -> ProtocolError | None:
    """Pass a message on to a side; return the ProtocolError that it raises."""
    try:
        side.on_message(node, message)
    except ProtocolError as error:
        return error
    return None
