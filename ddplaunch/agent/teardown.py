"""How an attempt ends on this node: ranks end or are told to, what they leave is swept, the last output drained."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial

from ddplaunch.agent.job import Outfit
from ddplaunch.agent.ranks import Phase, Ranks
from ddplaunch.agent.stragglers import Stragglers
from ddplaunch.agent.tree import Tree
from ddplaunch.agent.zygote_client import LEFTOVER_GRACE
from ddplaunch.control.messages import Drained, Finished, FromNode, Interrupted, Stop
from ddplaunch.control.rules import Rules
from ddplaunch.output.events import Event, Swept
from ddplaunch.output.streams import DRAIN_PATIENCE
from ddplaunch.rank import processes
from ddplaunch.words import counted, signal_name

RUNS = (Phase.RUNNING, Phase.STOPPING)
INSPECTION_PATIENCE = 1.5  # seconds for node 0 to have inspected all ranks, and to order the stop


class Teardown:
    """The end of one attempt, for any reason."""

    def __init__(
        self,
        ranks: Ranks,
        tree: Tree,
        outfit: Outfit,
        rules: Rules,
        emit: Callable[[Event], None],
        tell: Callable[[FromNode], None],
        done: Callable[[Drained], None],
        stragglers: Stragglers,
    ) -> None:
        """``tell`` tells the job; ``done`` gets the account when nothing is left."""
        self._ranks, self._tree = ranks, tree
        self._screen, self._streams, self._preemption_file = outfit.screen, outfit.streams, outfit.preemption_file
        self._grace, self._inspects, self._checkpoint = rules.grace, rules.inspects, outfit.policy.checkpoint
        self._emit, self._tell, self._done = emit, tell, done
        self._stragglers = stragglers
        self._interrupted = False

    def go_on(self) -> None:
        """A rank may have ended: say when all are done, and end what they have left."""
        ranks = self._ranks
        self._stragglers.await_them()
        if ranks.phase not in RUNS or not ranks.idle:
            return
        well = ranks.phase is Phase.RUNNING and not ranks.failures
        if well:
            self._tell(Finished(ranks.number))
        self.sweep(min(LEFTOVER_GRACE, self._grace) if well else 0)

    def interrupt(self, signalled: Interrupted, *, first: bool) -> None:
        """Somebody wants the job to end, and this node begins with it at once."""
        self._interrupted = True
        if self._ranks.phase is Phase.SWEEPING:
            self._tree.sweep(0)
        elif self._ranks.phase in RUNS and signalled.again:
            self.sweep(0)
        elif self._ranks.phase in RUNS:
            if first:
                self._ranks.pending -= self._tree.recall()
                count = len(self._ranks.processes) + self._ranks.pending  # these are on their way
                self._screen.note(_announce(signalled, counted(count, "rank")), of_job=True)
            stop = partial(self._stop, signalled.signal, self._grace)
            if self._inspects and self._ranks.phase is Phase.RUNNING:
                # They are inspected first, by the order of node 0, which may be out of reach.
                self._ranks.timers.after(INSPECTION_PATIENCE, stop)
            else:
                stop()

    def order(self, stop: Stop) -> None:
        if self._ranks.phase is Phase.LOADING:
            self.abandon()
        elif self._ranks.phase in RUNS and stop.grace == 0:
            self.sweep(0)
        elif self._ranks.phase in RUNS:
            self._stop(stop.signal, stop.grace)

    def _stop(self, number: int, grace: float) -> None:
        ranks = self._ranks
        if number in ranks.sent or ranks.phase not in RUNS:
            return
        ranks.pending -= self._tree.recall()
        if ranks.phase is Phase.RUNNING:
            ranks.enter(Phase.STOPPING)
            ranks.timers.after(grace, lambda: self.sweep(0))
        ranks.stop(number, spares_failing=not self._interrupted)
        self.go_on()

    def sweep(self, grace: float) -> None:
        """End all that is left, with so many seconds between SIGTERM and SIGKILL."""
        ranks = self._ranks
        if ranks.phase is Phase.SWEEPING:
            return
        ranks.enter(Phase.SWEEPING)
        ranks.cut_short()
        ranks.pending -= self._tree.recall()
        self._tree.sweep(grace)
        # A zygote that does not answer is itself stopped or stuck.
        ranks.timers.after(grace + processes.KILL_PATIENCE + 1, self._tree.kill)

    def abandon(self) -> None:
        """End a zygote that is still importing: no rank is there yet, and there may be no further attempt."""
        self._tree.close()
        self._ranks.pending = 0
        self._drain([], [])

    def swept(self, found: list[str], stuck: list[str]) -> None:
        """The zygote has nothing left below it; a second request to hurry is answered a second time."""
        if self._ranks.phase is Phase.SWEEPING:
            self._drain(found, stuck)

    def lost(self) -> None:
        """The zygote was killed, by us if it was silent, and its ranks with it (their parent-death signal)."""
        how = self._tree.close()
        if self._ranks.phase in (Phase.LOADING, *RUNS, Phase.SWEEPING):  # else the next attempt has one of its own
            stuck = self._tree.kill_ours()
            self._ranks.cut_off(how)
            self._drain([], stuck)

    def store_exited(self, how: str) -> None:
        """The process of the store has ended, so the ranks cannot go on."""
        if self._ranks.phase in RUNS:
            self._ranks.broke(how)
            self.sweep(0)
        else:
            self._screen.note(how)

    def _drain(self, found: list[str], stuck: list[str]) -> None:
        ranks = self._ranks
        ranks.timers.cancel()
        if found and not (ranks.failures or ranks.stopped or self._interrupted):
            self._screen.note(f"ended processes that the ranks left behind: {', '.join(found)}")
        if stuck:
            self._screen.note(f"these processes cannot be killed, and nothing waits for them: {', '.join(stuck)}")
        self._emit(Swept(tuple(found), tuple(stuck)))
        if self._checkpoint and ranks.started and not ranks.plan.node_rank:
            from ddplaunch.agent.checkpoint import newest

            if last := newest(self._checkpoint, ranks.codes.values()):
                self._emit(last)
        ranks.stopped += len(ranks.processes)
        ranks.enter(Phase.DRAINING)
        if self._streams.open:
            ranks.timers.after(DRAIN_PATIENCE, self.drained)
        else:
            self.drained()

    def drained(self) -> None:
        """All that the ranks ever printed has arrived."""
        if self._ranks.phase is Phase.DRAINING:
            self._ranks.close()
            account = self._ranks.account(self._streams, seen=self._preemption_file.seen)
            self._streams.close()
            self._done(account)


def _announce(signalled: Interrupted, ranks: str) -> str:
    """Announce the stop, and who or what asked for it where that was not Ctrl-C, which need not be named."""
    if signalled.reason or signalled.signal != signal.SIGINT:
        return f"{signalled.reason or signal_name(signalled.signal)}: stopping {ranks}"
    return f"stopping {ranks}; Ctrl-C again ends them at once"
