"""One node's ranks from start to end: a small state machine driven by orders, exits, signals and timers.

What the job does as a whole (that all stop when one fails, that all start again) is decided in ``control``; here it
is carried out.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.agent import limits
from ddplaunch.agent.inspections import NodeInspections
from ddplaunch.agent.job import Outfit
from ddplaunch.agent.policy import Policy
from ddplaunch.agent.profiles import NodeProfiles
from ddplaunch.agent.ranks import Phase, Ranks
from ddplaunch.agent.signals import ECHO, STOPPING, Direct, Signals
from ddplaunch.agent.store import Store
from ddplaunch.agent.stragglers import Stragglers
from ddplaunch.agent.teardown import Teardown
from ddplaunch.agent.temporary import PreemptionFile
from ddplaunch.agent.tree import Tree
from ddplaunch.control import messages
from ddplaunch.control.failure import Failure, Outcome, describe_end
from ddplaunch.control.link import attempt_plan, make_link
from ddplaunch.control.messages import Message
from ddplaunch.control.relay import FOR_RANKS, TOGETHER
from ddplaunch.control.route import NameServer
from ddplaunch.control.rules import Rules
from ddplaunch.control.waiting import describe
from ddplaunch.dataclass import replace
from ddplaunch.errors import EXIT_PREEMPTED, EXIT_SIGNAL, UsageError
from ddplaunch.loop import Callback, Loop
from ddplaunch.output import events, terminal
from ddplaunch.output.run_log import RunLog
from ddplaunch.output.screen import Screen
from ddplaunch.output.streams import Streams
from ddplaunch.plan.plan import Plan
from ddplaunch.preload import reminders
from ddplaunch.rank import processes
from ddplaunch.words import signal_name

if TYPE_CHECKING:
    from ddplaunch.agent.check import CheckOfNode
    from ddplaunch.agent.debugging import Debugging
    from ddplaunch.agent.missing_nodes import MissingNodes
    from ddplaunch.agent.sidecars import Sidecars
    from ddplaunch.agent.stall_clock import StallClock
    from ddplaunch.diagnosis.inspection import Detail, Inspection
    from ddplaunch.rank.messages import Usage


class Supervisor:
    """Runs this node's share of a job, through all its attempts, to its end."""

    def __init__(
        self,
        plan: Plan,
        policy: Policy,
        rules: Rules,
        environ: Mapping[str, str],
        loop: Loop,
        screen: Screen,
        log: RunLog,
        observers: events.Observers,
        asked: Callback,
        invite: Callable[[Debugging], object],
        listening: socket.socket | None,
    ) -> None:
        """Bind the ports and open the log folder; ``listening`` is on the control port, if that was claimed before.

        ``asked`` is called when somebody at the terminal asks what the ranks are doing, ``invite`` when a rank stops in
        its debugger and nobody is there.

        Raises:
            UsageError: a port is taken, there is no such interface, or the folder cannot be made.
        """
        self._policy, self._rules = policy, rules
        self._loop, self._screen, self._asked, self._invite = loop, screen, asked, invite
        limits.allow_descriptors(len(plan.local_ranks), 3 + 2 * bool(policy.log_dir) + policy.inspect)
        store = Store(plan, fresh=plan.nnodes == 1 or rules.port is not None)
        self._plan = replace(plan, master_port=store.port.number) if store.port else plan
        self._link = make_link(loop, self._plan, rules, self._hear, listening)
        if plan.hosts_store or rules.port is None:
            log.open(plan.run_id, plan.node_rank)
        self._tree = Tree(loop, policy, environ, plan.run_id, screen.note)
        self._observers, self._emit = observers, observers.emit
        self.streams = Streams(loop, screen, self._printed, lambda: self._teardown.drained(), whole=policy.show.whole)
        self._outfit = Outfit(policy, screen, self.streams, log, store, PreemptionFile(self._tree.temporary))
        self._name_server = NameServer(screen.note) if rules.port is not None else None
        self._signals, self._direct = Signals(policy.preempt_signal), Direct()
        node_only = rules.port is None and plan.nnodes > 1
        self._inspections = NodeInspections(loop, self._link.tell, self._complete, screen.note, node_only=node_only)
        self.profiles = NodeProfiles(loop, self._link.tell)
        self._stall_clock: StallClock | None = None
        self._check_of_node: CheckOfNode | None = None
        self._missing_nodes: MissingNodes | None = None
        self._outcome: Outcome | None = None
        self.debugging: Debugging | None = None
        self.sidecars: Sidecars | None = None  # to be ended when people have read how the job ended
        self._begin(-1, self._plan)

    def _begin(self, attempt: int, plan: Plan) -> None:
        tell, rules = self._link.tell, self._rules
        ranks = self._ranks = Ranks(attempt, plan, self._loop, self._tree.temporary)
        inspect, patience = partial(self.inspect_here, "stacks"), rules.straggler_timeout
        stragglers = Stragglers(self._loop, ranks, patience, inspect, tell, self._screen.note)
        self._teardown = Teardown(ranks, self._tree, self._outfit, rules, self._emit, tell, self._drained, stragglers)

    def inspect_here(self, detail: str, ranks: Ranks | None, done: Callable[[Inspection], None]) -> None:
        """Inspect the ranks of this node, where none are given those of this attempt."""
        ranks = ranks or self._ranks
        if self._stall_clock and detail == "state":
            done = self._stall_clock.noting(ranks, done)
        self._inspections.begin(ranks, diagnosis.inspection.Detail(detail), done)

    def _complete(self, inspection: Inspection, ranks: Ranks) -> Inspection:
        return self._stall_clock.complete(inspection, ranks) if self._stall_clock else inspection

    def _printed(self, rank: int) -> None:
        if self._stall_clock:
            self._stall_clock.printed(rank)

    def run(self) -> Outcome:
        """Run the job; returns when nothing of it is left here but its sidecars."""
        warning = self._policy.preempt_signal
        self._loop.catch(STOPPING, self._signalled, anyway=() if warning is None else (warning,))
        self._loop.catch(FOR_RANKS - {warning}, self._for_ranks)
        self._tree.plant(self._plan, self._outfit.store.path, self)
        processes.adopt_orphans()  # not before: a warm zygote is a detached process
        try:
            with terminal.restored():
                self._link.begin()
                while self._ranks.phase is not Phase.ENDED:
                    self._loop.step()
        finally:
            if self._check_of_node is not None:
                self._check_of_node.close()
            self._link.close()
            if self.debugging:
                self.debugging.close()
            self._tree.close()
            self._tree.temporary.remove()
            self._outfit.store.close()
        self._screen.end()
        while (outcome := self._outcome) is None or not (
            self._loop.settled and self._screen.written and self._link.closed
        ):
            self._loop.step()
        return outcome

    # ------------------------------------------------------------------------------------- what comes from the job

    def _hear(self, message: Message) -> None:
        match message:
            case messages.Joined():
                self._join(message)
            case messages.JoinStatus():
                self._screen.footer(describe(message), of_job=True)
                if not self._plan.node_rank and message.min_nodes == message.max_nodes:
                    self._look_for(message.missing)
            case messages.Seeking(trouble=trouble):
                self._screen.footer(f"waiting for node 0: {trouble}")
                self._look_for((0,))
            case messages.Alone():
                self._screen.speaks = True
            case messages.Check():
                self._check(message)
            case messages.Start() if not self._outfit.log.failed:  # else node 0, which hears of it, ends the job
                self._start(message)
            case messages.Stop(attempt=attempt) if attempt == self._ranks.number:
                self._teardown.order(message)
                if self.debugging:
                    self.debugging.release()
            case messages.Preempt(attempt=attempt) if attempt == self._ranks.number:
                self._make_room()
            case messages.ForRanks():
                self._loop.after(TOGETHER if message.direct else 0, partial(self._pass_on, message.number))
            case messages.Inspect():
                self._inspections.answer(self._ranks, message)
            case messages.Inspected(serial=serial) if serial:
                self._inspections.answered(message)
            case messages.TakeProfile():
                self.profiles.take(self._ranks, message)
            case messages.Profiled():
                self.profiles.answered(message)
            case messages.End(outcome=outcome):
                self._end(outcome)
            case _ if event := events.told(message):
                self._emit(event)

    def _look_for(self, missing: Sequence[int]) -> None:
        """See whether these nodes, which have not joined, still can."""
        if self._policy.in_step:
            from ddplaunch.agent.missing_nodes import MissingNodes

            if self._missing_nodes is None:
                self._missing_nodes = MissingNodes(self._loop, os.environ, self._plan, self._link.tell)
            self._missing_nodes.heard(missing)

    def _all_there(self) -> None:
        if self._missing_nodes:
            self._missing_nodes.close()
            self._missing_nodes = None

    def _join(self, joined: messages.Joined) -> None:
        self._all_there()
        if joined.node_rank is not None:
            self._plan = replace(self._plan, node_rank=joined.node_rank)
        try:
            self._outfit.log.open(joined.run_id, self._plan.node_rank, late=joined.late)
        except UsageError as error:
            self._link.tell(messages.Unable(error.message, error.hint))

    def _check(self, order: messages.Check) -> None:
        """Check whether this machine has what its ranks need; a check that is under way is for nothing now."""
        from ddplaunch.agent.check import CheckOfNode

        self._all_there()
        if self._check_of_node is not None:
            self._check_of_node.close()
        self._screen.footer("")  # all that were awaited have joined
        environ, log_dir = {**self._tree.environ, **self._plan.shared}, self._outfit.log.path
        footer, tell = self._screen.footer, self._link.tell
        self._check_of_node = CheckOfNode(self._loop, order, self._plan, environ, log_dir, footer, tell)

    def _start(self, order: messages.Start) -> None:
        self._all_there()
        plan, environ = self._plan, self._tree.environ
        if self._check_of_node is not None:
            self._check_of_node.close()
        if order.place:
            extra = self._name_server.variables() if self._name_server else {}
            plan = attempt_plan(plan, order, self._rules, environ, extra)
        plan = plan.with_store(torch=self._policy.preload.imports_torch)
        self._begin(order.attempt, plan)
        ranks = self._ranks
        self._emit(events.Planned(plan, order.attempt))
        zygote = self._tree.plant(plan, self._outfit.store.path, self)
        ranks.enter(Phase.RUNNING if zygote.ready else Phase.LOADING)
        self._outfit.store.begin()
        self._open_store()
        ranks.pending = len(plan.local_ranks)
        if self._policy.parks:  # before the ranks are: after a restart they start at once
            self._let_debug(ranks)
        zygote.spawn((rank.rank, partial(self._outfit.prepare, ranks, rank)) for rank in plan.local_ranks)
        self._wind_up(ranks)
        if self._policy.sidecars and self.sidecars is None:
            from ddplaunch.agent.sidecars import Sidecars

            self.sidecars = Sidecars(self._loop, self._outfit, self._emit, self._tree, self._rules.grace)
            self.sidecars.start()

    def _open_store(self) -> None:
        """Open the store of this attempt, as far as is known what the zygote has imported."""
        try:
            self._outfit.store.open(self._tree.zygote, self._ranks)
        except UsageError as error:
            self._link.tell(messages.Unable(error.message, error.hint))

    def _wind_up(self, ranks: Ranks) -> None:
        """Run the stall clock, where it can be judged here who waits; it is loaded while the zygote imports."""
        if ranks.plan.world_size == 1 and self._rules.stall_strict and not ranks.number:
            self._emit(events.Noted("--stall-timeout does nothing in a job of one rank, which waits for no other"))
        apart = self._rules.port is None and ranks.plan.nnodes > 1
        if ranks.plan.world_size == 1 or apart or not self._policy.inspect:
            return
        if self._stall_clock is None:
            from ddplaunch.agent.stall_clock import StallClock

            inspect = partial(self.inspect_here, "state")
            self._stall_clock = StallClock(self._loop, self._rules, inspect, self._link.tell, self._screen.note)
            self._observers.add(self._stall_clock)
        self._stall_clock.begin(ranks)

    def _restart_stall_clock(self) -> None:
        if self._stall_clock:
            self._stall_clock.restart()

    def _let_debug(self, ranks: Ranks) -> None:
        """Prepare for a person at the ranks; it is loaded while the zygote imports."""
        if self.debugging is None:
            from ddplaunch.agent.debugging import Debugging

            loop, where, timeout = self._loop, self._tree.temporary, self._policy.debug_timeout
            tell, note, restart = self._link.tell, self._screen.note, self._restart_stall_clock
            self.debugging = Debugging(loop, where, timeout, self._invite, self.inspect, note, tell, restart)
        self.debugging.begin(ranks)

    def _make_room(self) -> None:
        """Nobody is stopped yet: that is for the ranks to do, or for the job when their time is over."""
        trouble = self._outfit.preemption_file.give()
        if trouble and self._ranks.processes:
            self._screen.note(f"the ranks cannot learn of the preemption: {trouble}")
        self._emit(events.Preempted())
        forward, warning = self._policy.preempt_forward, self._policy.preempt_signal
        if forward is not None:
            self._loop.after(ECHO, partial(self._forward, forward, self._ranks.send))
        if warning not in (None, forward, signal.SIGINT):  # which Python itself handles in every rank
            self._loop.after(ECHO, partial(self._forward, warning, self._ranks.pass_on))

    def _forward(self, number: int, send: Callable[[int], object]) -> None:
        if self._ranks.catch(number):
            self._outfit.preemption_file.answered()
        if not self._direct.take(number):
            send(number)

    def _end(self, outcome: Outcome) -> None:
        self._all_there()
        self._outcome = outcome
        match self._ranks.phase:
            case Phase.WAITING:
                self._finish(outcome)
            case Phase.LOADING:
                self._teardown.abandon()
            case Phase.RUNNING | Phase.STOPPING:
                self._teardown.sweep(0)

    # ---------------------------------------------------------------------------------- what comes from the zygote

    def ready(self, forks: bool, failed: str | None, unsafe: str | None, seconds: float) -> None:
        if self._tree.zygote:
            self._tree.temporary.make(self._tree.zygote.remove)
        choice = self._policy.preload
        because, excluded = choice.account(failed)
        modules = (choice.fallback if failed else choice.modules) if forks else ()
        self._emit(events.Ready(forks, unsafe, seconds, modules, because, excluded, self._tree.cold))
        note = partial(reminders.note_slow_start, self._screen.note, self._plan.target.source)
        note(modules, because, forks=forks, failed=failed, unsafe=unsafe)
        if self._ranks.phase is Phase.LOADING:
            self._ranks.enter(Phase.RUNNING)
            self._open_store()

    def refused(self, message: str) -> None:
        self._link.tell(messages.Unable(message))

    def spawned(self, rank: int, pid: int, pidfd: int | None) -> None:
        process = self._ranks.spawned(rank, pid, pidfd)
        self._tree.lead(pid)
        self._emit(events.Started(rank, pid, self._ranks.number))
        if self._ranks.started == 1:
            self._link.tell(messages.RanksStarted(self._ranks.number))
        if self._outfit.preemption_file.given:
            self._outfit.preemption_file.give()  # before the first rank there was no folder yet
        if self._ranks.phase in (Phase.STOPPING, Phase.SWEEPING):
            process.stop(signal.SIGTERM)

    def unborn(self, rank: int, errno: int) -> None:
        """Those after it could not be started either: that is a failure of the job."""
        self._ranks.pending -= self._tree.recall()
        self._emit(events.FailedToStart(rank, errno, self._ranks.number))
        self._failed(self._ranks.unborn(rank, errno))

    def exited(self, rank: int, pid: int, code: int, usage: Usage) -> None:
        process = self._ranks.ended(rank, pid, code)
        if process is None:
            return
        self._emit(events.Exited(rank, pid, code, self._ranks.number, *usage))
        failure = None
        if code == EXIT_PREEMPTED and self._outfit.preemption_file.given:
            self._outfit.preemption_file.answered()
        elif code == 0:
            self._ranks.finish(rank)
        else:
            failure = self._ranks.judge(process, code, usage[0])
        self._failed(failure)

    def _failed(self, failure: Failure | None) -> None:
        if failure is not None and self._ranks.phase is Phase.RUNNING:
            self._link.tell(messages.Failed(self._ranks.number, failure, time.time()))
        self._teardown.go_on()

    def store_exited(self, pid: int, code: int) -> None:
        self._teardown.store_exited(f"the store (pid {pid}) {describe_end(code)}")

    def swept(self, found: list[str], stuck: list[str]) -> None:
        self._teardown.swept(found, stuck)

    def lost(self) -> None:
        self._teardown.lost()

    # ----------------------------------------------------------------------------------------- signals and the end

    def _signalled(self, number: int, reason: str = "") -> None:
        if number == signal.SIGTSTP:
            self._screen.suspend(self._ranks.suspend)
            return self._restart_stall_clock()
        if self._ranks.phase is Phase.ENDED:  # sidecars, output that nobody reads, or a peer, is all that we wait for
            if not (self.sidecars and self.sidecars.hurry()):
                os._exit(self._outcome.code if self._outcome else EXIT_SIGNAL + number)
            return
        if not reason and self._signals.asks(number):
            self._asked()
            return
        self._emit(events.Signalled(number))
        first = not self._signals.interrupted
        meaning = self._signals.take(number, reason)
        if isinstance(meaning, messages.Interrupted):
            if self.sidecars:
                self.sidecars.expected = True
            self._teardown.interrupt(meaning, first=first)
        self._link.tell(meaning)

    def told(self, number: int, rank: int | None) -> None:
        if rank is None:
            self._direct.add(number)
        elif self._ranks.phase is Phase.RUNNING and not self._signals.interrupted:
            self._signalled(number, f"rank {rank} sent {signal_name(number)} to its parent process")

    def _for_ranks(self, number: int) -> None:
        self._loop.after(ECHO, lambda: self._link.tell(messages.ForRanks(number, self._direct.has(number))))

    def _pass_on(self, number: int) -> None:
        if not self._direct.take(number):
            self._ranks.pass_on(number)

    def inspect(self, detail: Detail, answer: Callable[[Inspection], None]) -> None:
        """Find out what all ranks of the job do; ``answer`` is called with it, after some seconds at most."""
        self._inspections.ask(detail, answer)

    def note_state(self) -> None:
        """Keep what the ranks here hold now, as one may run out of memory later; note a stopped zygote."""
        self._tree.note_stopped()
        if self._ranks.memory:
            self._ranks.memory.note()

    def stop(self, now: bool, command: str = "") -> None:
        """End the job as Ctrl-C does; ``now``: as it does when it comes again. ``command``: which requests it."""
        for _ in range(1 + now):
            if self._ranks.phase is not Phase.ENDED:
                self._signalled(signal.SIGINT, command and f"`{command}` was called")

    def _drained(self, account: messages.Drained) -> None:
        if self._outcome is not None:
            return self._finish(self._outcome)
        self._ranks.enter(Phase.WAITING)
        if self._ranks.arrivals:
            self._link.tell(messages.Arrived(self._ranks.number, tuple(self._ranks.arrivals)))
        self._link.tell(account)

    def _finish(self, outcome: Outcome) -> None:
        self._emit(events.Ended(outcome.code, outcome.verdict, outcome.remark))
        self._ranks.enter(Phase.ENDED)
