"""One node's ranks from start to end: a small state machine driven by orders, exits, signals and timers.

What the job does as a whole (that all stop when one fails, that all start again) is decided in ``control``; here it
is carried out.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.agent import job, limits
from ddplaunch.agent.attempt import INTERRUPT_PATIENCE, Attempt
from ddplaunch.agent.first_rank import FirstRank
from ddplaunch.agent.kin import Kin
from ddplaunch.agent.outfit import Outfit
from ddplaunch.agent.phase import NEXT, Phase
from ddplaunch.agent.policy import Policy
from ddplaunch.agent.preemption_file import PreemptionFile
from ddplaunch.agent.rank_process import suspend
from ddplaunch.agent.stragglers import Stragglers
from ddplaunch.agent.temporary import StoreFile, Temporary
from ddplaunch.agent.zygote_client import LEFTOVER_GRACE, ZygoteClient
from ddplaunch.control import messages, placement
from ddplaunch.control.failure import Failure, Outcome, describe_end
from ddplaunch.control.join_status import describe
from ddplaunch.control.link import make_link
from ddplaunch.control.messages import Message
from ddplaunch.control.port import Port
from ddplaunch.control.route import NameServer
from ddplaunch.control.rules import Rules
from ddplaunch.errors import EXIT_PREEMPTED, EXIT_SIGNAL, UsageError
from ddplaunch.loop import Loop, Timers
from ddplaunch.output import events, terminal
from ddplaunch.output.run_log import RunLog
from ddplaunch.output.screen import Screen
from ddplaunch.output.streams import DRAIN_PATIENCE, Streams
from ddplaunch.plan.plan import Plan
from ddplaunch.rank import processes

if TYPE_CHECKING:
    from ddplaunch.agent.sidecars import Sidecars

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
"""What we act on, if we did not inherit it as ignored; a warning by one of them is one only the first time."""


class Supervisor:
    """Runs this node's share of a job, through all its attempts, to its end.

    ``sidecars`` is what runs beside the ranks: to be ended when all is told.
    """

    def __init__(
        self,
        plan: Plan,
        policy: Policy,
        rules: Rules,
        environ: Mapping[str, str],
        loop: Loop,
        screen: Screen,
        log: RunLog,
        observers: Sequence[events.Observer],
        listening: socket.socket | None = None,
    ) -> None:
        """Bind the ports and open the log folder; ``listening`` is on the control port, if that was claimed before.

        Raises:
            UsageError: a port is taken, there is no such interface, or the folder cannot be made.
        """
        self._policy = policy
        self._rules = rules
        limits.allow_descriptors(len(plan.local_ranks), 4 if policy.log_dir else 3)
        self._port = Port(plan.master_addr, plan.master_port, nnodes=plan.nnodes) if plan.hosts_store else None
        self._plan = replace(plan, master_port=self._port.number) if self._port else plan
        self._environ = {name: value for name, value in environ.items() if name not in job.OURS_ALONE}
        self._loop = loop
        self._link = make_link(self._loop, self._plan, rules, self.hear, listening)
        self._screen = screen
        self._streams = Streams(loop, screen, self._drained)
        self._log = log
        self._observers = observers
        self._say = screen.note
        if plan.hosts_store or rules.port is None:
            log.open(plan.run_id, plan.node_rank)
        self._planned = self._plan
        self._temporary = Temporary(f"ddplaunch-{plan.run_id}")
        self._preemption_file = PreemptionFile(self._temporary)
        self._kin = Kin(self._temporary)
        self._outfit = Outfit(screen, self._streams, log, policy, self._preemption_file, self._port)
        self._name_server = NameServer(self._say) if rules.port is not None else None
        self._phase = Phase.WAITING
        self._zygote: ZygoteClient | None = None
        self.sidecars: Sidecars | None = None
        self._warned = self._interrupted = False
        self._outcome: Outcome | None = None
        heard_of = plan.nnodes == 1 or rules.port is not None
        self._store_file = StoreFile(plan.init_method if plan.hosts_store else None, fresh=heard_of)
        self._begin(-1)

    def _begin(self, number: int) -> None:
        """Forget the previous attempt."""
        self._attempt = Attempt(number, self._temporary)
        self._first_rank = FirstRank(self._loop, self._first_rank_finished)
        self._stragglers = Stragglers(self._loop, self._attempt, self._say, alone=self._plan.nnodes == 1)
        self._timers = Timers(self._loop)

    # ------------------------------------------------------------------------------------------------ from outside

    def run(self) -> Outcome:
        """Run the job; returns when nothing of it is left here but its sidecars."""
        processes.adopt_orphans()
        warning = self._policy.preempt_signal
        self._loop.catch(STOPPING, self._signalled, anyway=() if warning is None else (warning,))
        self._start_zygote()
        try:
            with terminal.restored():
                self._link.begin()
                while self._phase is not Phase.ENDED:
                    self._loop.step()
        finally:
            self._link.close()
            if self._zygote:
                self._zygote.close()
            if self._port:
                self._port.close()
            self._temporary.remove()
            self._store_file.remove()
        while not (self._screen.written and self._link.closed):
            self._loop.step()
        assert self._outcome is not None
        return self._outcome

    # ------------------------------------------------------------------------------------------------------ orders

    def hear(self, message: Message) -> None:
        """Carry out what the job wants of this node."""
        match message:
            case messages.Joined():
                self._join(message)
            case messages.JoinStatus():
                self._screen.footer(describe(message), of_job=True)
            case messages.Seeking(trouble=trouble):
                self._screen.footer(f"waiting for node 0: {trouble}")
            case messages.Alone():
                self._screen.speaks = True
            case messages.Start():
                self._start(message)
            case messages.Stop(attempt=attempt) if attempt == self._attempt.number:
                self._ordered_to_stop(message)
            case messages.Preempt(attempt=attempt) if attempt == self._attempt.number:
                self._make_room()
            case messages.Release(attempt=attempt) if attempt == self._attempt.number:
                self._attempt.released = True
                self._check_ended()
            case messages.Again():
                self._emit(events.Restarting(message.attempt, message.wait, message.text, message.verdict))
            case messages.Note(text=text):
                self._emit(events.Noted(text))
            case messages.End(outcome=outcome):
                self._end(outcome)

    def _join(self, joined: messages.Joined) -> None:
        if joined.node_rank is not None:
            self._plan = self._planned = replace(self._planned, node_rank=joined.node_rank)
        try:
            self._log.open(joined.run_id, self._plan.node_rank)
        except UsageError as error:
            self._link.tell(messages.Unable(error.message, error.hint))

    def _start(self, order: messages.Start) -> None:
        self._begin(order.attempt)
        if order.shares:
            extra = self._name_server.variables() if self._name_server else {}
            self._plan = placement.joined(self._planned, order, self._rules, self._environ, extra)
        self._emit(events.Planned(self._plan, order.attempt))
        zygote = self._zygote or self._start_zygote()
        self._enter(Phase.RUNNING if zygote.ready else Phase.LOADING)
        self._spawn_ranks(zygote)
        if self._policy.sidecars and self.sidecars is None:
            from ddplaunch.agent.sidecars import Sidecars

            self.sidecars = Sidecars(
                self._loop, self._screen, self._streams, self._log, self._emit, self._policy, self._rules.grace
            )
            self.sidecars.start(self._environ, self._kin)

    def _ordered_to_stop(self, order: messages.Stop) -> None:
        match self._phase:
            case Phase.LOADING:
                self._abandon_zygote()
            case Phase.RUNNING | Phase.STOPPING if order.grace == 0:
                self._sweep(0)
            case Phase.RUNNING | Phase.STOPPING:
                self._stop(order.signal, order.grace)

    def _end(self, outcome: Outcome) -> None:
        self._outcome = outcome
        match self._phase:
            case Phase.WAITING:
                self._finish()
            case Phase.LOADING:
                self._abandon_zygote()
            case Phase.RUNNING | Phase.STOPPING:
                self._sweep(0)

    # ---------------------------------------------------------------------------------------------------- starting

    def _start_zygote(self) -> ZygoteClient:
        self._zygote = ZygoteClient(
            self._loop,
            environment={**self._environ, **self._plan.shared},
            modules=self._policy.modules,
            asked=self._policy.asked,
            first=self._plan.target.first or os.getcwd(),
            remove=[path for path in (self._temporary.path, self._store_file.path) if path],
            title=job.title(self._plan),
            shielded=job.shielded(self._policy.preempt_signal),
            listener=self,
        )
        return self._zygote

    def _abandon_zygote(self) -> None:
        """End one that is still importing: no rank is there yet, and there may be no further attempt."""
        assert self._zygote is not None
        self._zygote.close()
        self._zygote = None
        self._attempt.pending = 0
        self._swept([], [])

    def _spawn_ranks(self, zygote: ZygoteClient) -> None:
        self._store_file.begin()
        self._attempt.pending = len(self._plan.local_ranks)
        make = partial(self._outfit.make, self._plan, self._attempt, self._first_rank)
        zygote.spawn((rank.rank, partial(make, rank)) for rank in self._plan.local_ranks)

    # ------------------------------------------------------------------------------------------------ what we hear

    def ready(self, forks: bool, unsafe: str | None, seconds: float) -> None:
        assert self._zygote is not None
        self._temporary.make(self._zygote.remove)
        self._emit(events.Ready(forks, unsafe, seconds))
        if unsafe:
            self._say(f"ranks start one by one instead of being forked: {unsafe}")
        if self._phase is Phase.LOADING:
            self._enter(Phase.RUNNING)

    def refused(self, message: str) -> None:
        self._link.tell(messages.Unable(message))

    def swept(self, found: list[str], stuck: list[str]) -> None:
        if self._phase is Phase.SWEEPING:  # impatience asks twice, and is answered twice
            self._swept(found, stuck)

    def spawned(self, number: int, pid: int, pidfd: int | None) -> None:
        process = self._attempt.spawned(self._plan.ranks[number], pid, pidfd)
        self._kin.lead(pid)
        self._emit(events.Started(number, pid, self._attempt.number))
        if number == 0:
            self._first_rank.watch()
        if self._preemption_file.given:
            self._preemption_file.give()  # before the first rank there was no folder yet
        if self._phase in (Phase.STOPPING, Phase.SWEEPING):
            process.stop(signal.SIGTERM)

    def unborn(self, number: int, reason: int) -> None:
        """A rank's process cannot be made, and those after it could not either: that is a failure of the job."""
        self._recall()
        self._emit(events.FailedToStart(number, reason, self._attempt.number))
        self._failed(self._attempt.unborn(self._plan, number, reason))

    def _recall(self) -> None:
        """Ranks that have no process yet get none."""
        self._attempt.pending -= self._zygote.recall() if self._zygote else 0

    def _failed(self, failure: Failure | None) -> None:
        if failure is not None and self._phase is Phase.RUNNING:
            self._link.tell(messages.Failed(self._attempt.number, failure, time.time()))
        self._check_ended()

    def _first_rank_finished(self) -> None:
        if 0 in self._attempt.processes:
            self._attempt.processes[0].finished = True
            self._emit(events.Finished(0))
            self._check_ended()

    def exited(self, number: int, pid: int, code: int) -> None:
        process = self._attempt.ended(number, pid)
        if process is None:
            return
        self._emit(events.Exited(number, pid, code, self._attempt.number))
        failure = None
        if code == EXIT_PREEMPTED and self._preemption_file.given:
            self._preemption_file.answered()
        elif code != 0 and not process.finished:
            failure = self._attempt.judge(process, code)
        self._failed(failure)

    def lost(self) -> None:
        """It was killed, by us if it was silent, and its ranks with it (their parent-death signal)."""
        if self._zygote is None or self._phase is Phase.ENDED:
            return
        silent, status, pid = self._zygote.killed, self._zygote.close(), self._zygote.pid
        self._zygote = None
        if self._phase in (Phase.WAITING, Phase.DRAINING):
            return  # the next attempt has one of its own, and says so if that one cannot live either
        how = describe_end(-signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status))
        stuck, _ = processes.kill_all_below(os.getpid(), spare=self._kin.spares)
        self._attempt.cut_off(None if silent else f"the zygote (pid {pid}) {how}, and its ranks with it")
        self._swept([], stuck)

    # ---------------------------------------------------------------------------------------------------- stopping

    def _signalled(self, number: int) -> None:
        if number == signal.SIGTSTP:
            return suspend(self._attempt.processes.values())
        if self._phase is Phase.ENDED and self.sidecars and self.sidecars.hurry():
            return
        if self._phase is Phase.ENDED:  # output that nobody reads, or a peer, is all that we wait for
            os._exit(self._outcome.code if self._outcome else EXIT_SIGNAL + number)
        self._emit(events.Signalled(number))
        if number == self._policy.preempt_signal and (not self._warned or number not in STOPPING):
            self._warned = True
            return self._link.tell(messages.Warned(number))
        # SIGTERM twice is no impatience: a preempted job of Slurm gets it when its grace begins and when that is over.
        again = self._interrupted and number in (signal.SIGINT, signal.SIGQUIT)
        first, self._interrupted = not self._interrupted, True
        if self.sidecars:
            self.sidecars.expected = True
        match self._phase:
            case Phase.RUNNING | Phase.STOPPING if again:
                self._sweep(0)
            case Phase.RUNNING | Phase.STOPPING:
                if first:
                    count = len(self._attempt.processes)
                    stopping = f"stopping {count} rank{'s' * (count != 1)}; Ctrl-C again ends them at once"
                    self._screen.note(stopping, of_job=True)
                self._stop(number, self._rules.grace)
            case Phase.SWEEPING if self._zygote:
                self._zygote.sweep(0)
        self._link.tell(messages.Interrupted(number, again))

    def _make_room(self) -> None:
        """Nobody is stopped yet: that is for the ranks to do, or for the job when their time is over."""
        trouble = self._preemption_file.give()
        if trouble and self._attempt.processes:
            self._say(f"the ranks cannot see that they must make room: {trouble}")
        self._emit(events.Preempted())
        if self._policy.preempt_forward is not None:
            self._attempt.send_all(self._policy.preempt_forward)

    def _stop(self, number: int, grace: float) -> None:
        if number in self._attempt.told:
            return
        self._attempt.told.add(number)
        self._recall()
        if self._phase is Phase.RUNNING:
            self._enter(Phase.STOPPING)
            self._timers.after(grace, lambda: self._sweep(0))
        if number != signal.SIGTERM:
            self._timers.after(INTERRUPT_PATIENCE, lambda: self._attempt.stop_all(signal.SIGTERM))
        self._attempt.stop_all(number)
        self._check_ended()

    def _check_ended(self) -> None:
        """Say when all ranks have done their work; let rank 0 go, and sweep, once no other node needs the store."""
        attempt = self._attempt
        self._stragglers.watch()
        if self._phase not in (Phase.RUNNING, Phase.STOPPING) or not attempt.idle:
            return
        if self._phase is Phase.RUNNING and not attempt.failures and not attempt.finished:
            attempt.finished = True
            self._link.tell(messages.Finished(attempt.number))  # the answer may come at once, by way of ``hear``
            if self._phase is not Phase.RUNNING:
                return
        if self._first_rank.held and attempt.finished and self._phase is Phase.RUNNING and not attempt.released:
            return
        self._first_rank.release()
        if not attempt.processes:
            ended_well = self._phase is Phase.RUNNING and attempt.finished
            self._sweep(min(LEFTOVER_GRACE, self._rules.grace) if ended_well else 0)

    def _sweep(self, grace: float) -> None:
        if self._phase is Phase.SWEEPING:
            return
        self._enter(Phase.SWEEPING)
        self._attempt.cut_short()
        self._recall()
        assert self._zygote is not None
        self._zygote.sweep(grace)
        # A zygote that does not answer is itself stopped or stuck.
        self._timers.after(grace + processes.KILL_PATIENCE + 1, self._zygote.kill)

    def _swept(self, found: list[str], stuck: list[str]) -> None:
        if self._phase in (Phase.DRAINING, Phase.ENDED):
            return
        self._timers.cancel()
        attempt = self._attempt
        if found and not attempt.failures and not attempt.stopped and not self._interrupted:
            self._say(f"ended what the ranks left behind: {', '.join(found)}")
        if stuck:
            self._say(f"cannot be killed, so not waited for: {', '.join(stuck)}")
        self._emit(events.Swept(tuple(found), tuple(stuck)))
        self._first_rank.release()
        attempt.stopped += len(attempt.processes)
        self._enter(Phase.DRAINING)
        if self._streams.open:
            self._timers.after(DRAIN_PATIENCE, self._drained)
        else:
            self._drained()

    def _drained(self) -> None:
        """All that the ranks ever printed has arrived: decide what comes next."""
        if self._phase is not Phase.DRAINING:
            return
        self._timers.cancel()
        account = self._attempt.account(self._streams, heeded=self._preemption_file.heeded)
        self._streams.close()
        if self._outcome is not None:
            return self._finish()
        self._enter(Phase.WAITING)
        self._link.tell(account)

    def _finish(self) -> None:
        assert self._outcome is not None
        self._streams.close()
        self._emit(events.Ended(self._outcome.code, self._outcome.verdict))
        self._phase = Phase.ENDED

    def _emit(self, event: events.Event) -> None:
        for observer in self._observers:
            observer.observe(event)

    def _enter(self, phase: Phase) -> None:
        assert phase in NEXT[self._phase], f"{self._phase} to {phase}"
        self._phase = phase
