"""The end of an attempt on this node: ranks end or are stopped, leftover processes are swept, output is drained."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial

from ddplaunch.base.text import format_count, signal_name
from ddplaunch.core.events import AttemptSwept, Event
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.messages import AttemptReport, FailureReported, FromNode, RanksFinished, StopAttempt, StopRequested
from ddplaunch.core.node.node_context import NodeContext
from ddplaunch.core.node.node_ranks import AttemptPhase, NodeRanks
from ddplaunch.core.node.process_tree import ProcessTree
from ddplaunch.core.node.zygote_client import LEFTOVER_GRACE_S
from ddplaunch.core.output.streams import DRAIN_TIMEOUT_S
from ddplaunch.core.rank import proc_utils

RUNNING_PHASES = (AttemptPhase.RUNNING, AttemptPhase.STOPPING)
STOP_ORDER_TIMEOUT_S = 1.5  # seconds for node 0 to order a stop: it may ask all nodes for something before


class Teardown:
    """Ends one attempt, for any reason."""

    def __init__(
        self,
        ranks: NodeRanks,
        tree: ProcessTree,
        context: NodeContext,
        config: JobConfig,
        emit: Callable[[Event], None],
        send: Callable[[FromNode], None],
        on_done: Callable[[AttemptReport], None],
    ) -> None:
        """``send`` sends a control message; ``on_done`` gets the attempt report when no process is left."""
        self._ranks, self._tree = ranks, tree
        self._screen, self._streams, self._preemption_file = context.screen, context.streams, context.preemption_file
        self._grace, self._awaits_order = config.grace, config.inspects_before_stop
        self._emit, self._send, self._on_done = emit, send, on_done
        self._interrupted = False

    def check_progress(self) -> None:
        """A rank may have ended: if it was the last one, report that and kill leftover processes."""
        ranks = self._ranks
        if ranks.phase not in RUNNING_PHASES or not ranks.is_idle:
            return
        succeeded = ranks.phase is AttemptPhase.RUNNING and not ranks.failures
        if succeeded:
            self._send(RanksFinished(ranks.number))
        self.sweep(min(LEFTOVER_GRACE_S, self._grace) if succeeded else 0)

    def on_stop_requested(self, request: StopRequested, *, first: bool) -> None:
        """Begin to stop the ranks at once, before node 0 orders it."""
        self._interrupted = True
        if self._ranks.phase is AttemptPhase.SWEEPING:
            self._tree.sweep(0)
        elif self._ranks.phase in RUNNING_PHASES and request.again:
            self.sweep(0)
        elif self._ranks.phase in RUNNING_PHASES:
            if first:
                self._ranks.not_spawned -= self._tree.cancel_pending()
                count = len(self._ranks.processes) + self._ranks.not_spawned  # those being spawned
                self._screen.show_note(_describe_stop_request(request, format_count(count, "rank")), of_job=True)
            stop = partial(self._stop_ranks, request.signal, self._grace)
            if self._awaits_order and self._ranks.phase is AttemptPhase.RUNNING:
                self._ranks.timers.call_later(STOP_ORDER_TIMEOUT_S, stop)  # node 0 may be unreachable
            else:
                stop()

    def on_stop(self, stop: StopAttempt) -> None:
        if self._ranks.phase is AttemptPhase.LOADING:
            self.kill_loading_zygote()
        elif self._ranks.phase in RUNNING_PHASES and stop.grace_s == 0:
            self.sweep(0)
        elif self._ranks.phase in RUNNING_PHASES:
            self._stop_ranks(stop.signal, stop.grace_s)

    def _stop_ranks(self, number: int, grace: float) -> None:
        ranks = self._ranks
        if number in ranks.stop_signals or ranks.phase not in RUNNING_PHASES:
            return
        ranks.not_spawned -= self._tree.cancel_pending()
        if ranks.phase is AttemptPhase.RUNNING:
            ranks.set_phase(AttemptPhase.STOPPING)
            ranks.timers.call_later(grace, lambda: self.sweep(0))
        ranks.stop(number, spares_failing=not self._interrupted)
        self.check_progress()

    def sweep(self, grace: float) -> None:
        """Kill all processes that are left, with ``grace`` seconds between SIGTERM and SIGKILL."""
        ranks = self._ranks
        if ranks.phase is AttemptPhase.SWEEPING:
            return
        ranks.set_phase(AttemptPhase.SWEEPING)
        ranks.mark_stopped()
        ranks.not_spawned -= self._tree.cancel_pending()
        self._tree.sweep(grace)
        # A zygote that does not answer is itself stopped, or blocked in the kernel.
        ranks.timers.call_later(grace + proc_utils.KILL_TIMEOUT_S + 1, self._tree.kill)

    def kill_loading_zygote(self) -> None:
        """End a zygote that is still importing: it has no ranks yet, and there may be no further attempt."""
        self._tree.close()
        self._ranks.not_spawned = 0
        self._drain([], [])

    def on_swept(self, found: list[str], stuck: list[str]) -> None:
        """The zygote has no descendants left; a second sweep request gets a second reply, which is ignored."""
        if self._ranks.phase is AttemptPhase.SWEEPING:
            self._drain(found, stuck)

    def on_zygote_lost(self) -> None:
        """The zygote was killed (by the launcher if it did not answer), and its ranks by their parent-death signal."""
        how = self._tree.close()
        # In other phases nothing is lost: the next attempt starts a zygote of its own.
        if self._ranks.phase in (AttemptPhase.LOADING, *RUNNING_PHASES, AttemptPhase.SWEEPING):
            stuck = self._tree.kill_remaining()
            for failure in self._ranks.on_zygote_lost(how):
                self._send(FailureReported(self._ranks.number, failure, time.time()))
            self._drain([], stuck)

    def on_store_exited(self, how: str) -> None:
        """The process of the store has ended: the ranks cannot continue without it."""
        if self._ranks.phase in RUNNING_PHASES:
            self._ranks.set_launcher_failure(how)
            self.sweep(0)
        else:
            self._screen.show_note(how)

    def _drain(self, found: list[str], stuck: list[str]) -> None:
        ranks = self._ranks
        ranks.timers.cancel_all()
        if found and not (ranks.failures or ranks.stopped_count or self._interrupted):
            self._screen.show_note(f"killed leftover processes of the ranks: {', '.join(found)}")
        if stuck:
            self._screen.show_note(f"not waiting for processes that cannot be killed: {', '.join(stuck)}")
        self._emit(AttemptSwept(tuple(found), tuple(stuck)))
        ranks.stopped_count += len(ranks.processes)
        ranks.set_phase(AttemptPhase.DRAINING)
        if self._streams.has_open:
            ranks.timers.call_later(DRAIN_TIMEOUT_S, self.on_output_drained)
        else:
            self.on_output_drained()

    def on_output_drained(self) -> None:
        """All output of the ranks has been read, or ``DRAIN_TIMEOUT_S`` is over: report the attempt."""
        if self._ranks.phase is AttemptPhase.DRAINING:
            self._ranks.close()
            report = self._ranks.build_report(self._streams, seen=self._preemption_file.was_seen)
            self._streams.close()
            self._on_done(report)


def _describe_stop_request(request: StopRequested, ranks: str) -> str:
    """Describe a stop request; the reason or signal is named unless it was Ctrl-C."""
    if request.reason or request.signal != signal.SIGINT:
        return f"{request.reason or signal_name(request.signal)}: stopping {ranks}"
    return f"stopping {ranks}; Ctrl-C again kills them now"
