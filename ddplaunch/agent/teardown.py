"""How an attempt ends on this node: ranks end or are told to, what they leave is swept, the last output drained."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial

from ddplaunch.agent.job import NodeContext
from ddplaunch.agent.ranks import AttemptPhase, NodeRanks
from ddplaunch.agent.stragglers import StragglerMonitor
from ddplaunch.agent.tree import ProcessTree
from ddplaunch.agent.zygote_client import LEFTOVER_GRACE_S
from ddplaunch.control.messages import AttemptReport, FromNode, RanksFinished, StopAttempt, StopRequested
from ddplaunch.control.rules import JobConfig
from ddplaunch.output.events import AttemptSwept, Event
from ddplaunch.output.streams import DRAIN_TIMEOUT_S
from ddplaunch.rank import processes
from ddplaunch.words import format_count, signal_name

RUNNING_PHASES = (AttemptPhase.RUNNING, AttemptPhase.STOPPING)
INSPECTION_TIMEOUT_S = 1.5  # seconds for node 0 to have inspected all ranks, and to order the stop


class Teardown:
    """The end of one attempt, for any reason."""

    def __init__(
        self,
        ranks: NodeRanks,
        tree: ProcessTree,
        context: NodeContext,
        rules: JobConfig,
        emit: Callable[[Event], None],
        send: Callable[[FromNode], None],
        on_done: Callable[[AttemptReport], None],
        stragglers: StragglerMonitor,
    ) -> None:
        """``send`` tells the job; ``on_done`` gets the account when nothing is left."""
        self._ranks, self._tree = ranks, tree
        self._screen, self._streams, self._preemption_file = context.screen, context.streams, context.preemption_file
        self._grace, self._inspects, self._checkpoint = (
            rules.grace,
            rules.inspects_before_stop,
            context.policy.checkpoint,
        )
        self._emit, self._tell, self._done = emit, send, on_done
        self._stragglers = stragglers
        self._interrupted = False

    def check_progress(self) -> None:
        """A rank may have ended: say when all are done, and end what they have left."""
        ranks = self._ranks
        self._stragglers.start_timers()
        if ranks.phase not in RUNNING_PHASES or not ranks.is_idle:
            return
        well = ranks.phase is AttemptPhase.RUNNING and not ranks.failures
        if well:
            self._tell(RanksFinished(ranks.number))
        self.sweep(min(LEFTOVER_GRACE_S, self._grace) if well else 0)

    def on_stop_requested(self, signalled: StopRequested, *, first: bool) -> None:
        """Somebody wants the job to end, and this node begins with it at once."""
        self._interrupted = True
        if self._ranks.phase is AttemptPhase.SWEEPING:
            self._tree.sweep(0)
        elif self._ranks.phase in RUNNING_PHASES and signalled.again:
            self.sweep(0)
        elif self._ranks.phase in RUNNING_PHASES:
            if first:
                self._ranks.not_spawned -= self._tree.cancel_pending()
                count = len(self._ranks.processes) + self._ranks.not_spawned  # these are on their way
                self._screen.show_note(_announce(signalled, format_count(count, "rank")), of_job=True)
            stop = partial(self._stop_ranks, signalled.signal, self._grace)
            if self._inspects and self._ranks.phase is AttemptPhase.RUNNING:
                # They are inspected first, by the order of node 0, which may be out of reach.
                self._ranks.timers.call_later(INSPECTION_TIMEOUT_S, stop)
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
        """End all that is left, with so many seconds between SIGTERM and SIGKILL."""
        ranks = self._ranks
        if ranks.phase is AttemptPhase.SWEEPING:
            return
        ranks.set_phase(AttemptPhase.SWEEPING)
        ranks.mark_stopped()
        ranks.not_spawned -= self._tree.cancel_pending()
        self._tree.sweep(grace)
        # A zygote that does not answer is itself stopped or stuck.
        ranks.timers.call_later(grace + processes.KILL_TIMEOUT_S + 1, self._tree.kill)

    def kill_loading_zygote(self) -> None:
        """End a zygote that is still importing: no rank is there yet, and there may be no further attempt."""
        self._tree.close()
        self._ranks.not_spawned = 0
        self._drain([], [])

    def on_swept(self, found: list[str], stuck: list[str]) -> None:
        """The zygote has nothing left below it; a second request to hurry is answered a second time."""
        if self._ranks.phase is AttemptPhase.SWEEPING:
            self._drain(found, stuck)

    def on_zygote_lost(self) -> None:
        """The zygote was killed, by us if it was silent, and its ranks with it (their parent-death signal)."""
        how = self._tree.close()
        if self._ranks.phase in (
            AttemptPhase.LOADING,
            *RUNNING_PHASES,
            AttemptPhase.SWEEPING,
        ):  # else the next attempt has one of its own
            stuck = self._tree.kill_remaining()
            self._ranks.on_zygote_lost(how)
            self._drain([], stuck)

    def store_exited(self, how: str) -> None:
        """The process of the store has ended, so the ranks cannot go on."""
        if self._ranks.phase in RUNNING_PHASES:
            self._ranks.broke(how)
            self.sweep(0)
        else:
            self._screen.show_note(how)

    def _drain(self, found: list[str], stuck: list[str]) -> None:
        ranks = self._ranks
        ranks.timers.cancel_all()
        if found and not (ranks.failures or ranks.stopped_count or self._interrupted):
            self._screen.show_note(f"ended processes that the ranks left behind: {', '.join(found)}")
        if stuck:
            self._screen.show_note(f"these processes cannot be killed, and nothing waits for them: {', '.join(stuck)}")
        self._emit(AttemptSwept(tuple(found), tuple(stuck)))
        if self._checkpoint and ranks.spawned_count and not ranks.plan.node_rank:
            from ddplaunch.agent.checkpoint import find_newest_checkpoint

            if last := find_newest_checkpoint(self._checkpoint, ranks.exit_codes.values()):
                self._emit(last)
        ranks.stopped_count += len(ranks.processes)
        ranks.set_phase(AttemptPhase.DRAINING)
        if self._streams.has_open:
            ranks.timers.call_later(DRAIN_TIMEOUT_S, self.on_output_drained)
        else:
            self.on_output_drained()

    def on_output_drained(self) -> None:
        """All that the ranks ever printed has arrived."""
        if self._ranks.phase is AttemptPhase.DRAINING:
            self._ranks.close()
            account = self._ranks.build_report(self._streams, seen=self._preemption_file.was_seen)
            self._streams.close()
            self._done(account)


def _announce(signalled: StopRequested, ranks: str) -> str:
    """Announce the stop, and who or what asked for it where that was not Ctrl-C, which need not be named."""
    if signalled.reason or signalled.signal != signal.SIGINT:
        return f"{signalled.reason or signal_name(signalled.signal)}: stopping {ranks}"
    return f"stopping {ranks}; Ctrl-C again ends them at once"
