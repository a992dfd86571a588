"""What the nodes of a job do next, decided in one place, on node 0; a job of one node is decided here too.

Decisions only: messages come in, messages go out. ``node_zero`` brings them from and to other machines.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial

from ddplaunch.control import agreement, messages
from ddplaunch.control.attempt import BEFORE_RANKS, NEXT_STAGE, SETTLE, JobAttempt, Loss, Stage
from ddplaunch.control.failure import Failure, Outcome, Verdict, early_report
from ddplaunch.control.inspections import JobInspections
from ddplaunch.control.membership import Membership
from ddplaunch.control.messages import Arrived, Beat, ForRanks, Hello, Message
from ddplaunch.control.profiles import JobProfiles
from ddplaunch.control.restarts import Restarts
from ddplaunch.control.rules import Rules
from ddplaunch.control.seat import Part, Seat, Seats
from ddplaunch.control.time_limits import Cut, TimeLimits
from ddplaunch.control.waiting import Joining, LateNodes
from ddplaunch.errors import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_TIMEOUT, EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.loop import Callback, Timer, Timers
from ddplaunch.plan import share
from ddplaunch.words import signal_name

EARLY_REPORT = 0.6  # seconds after a failure when people read of it, if its report cannot be given by then
OVERDUE = 30.0  # seconds beyond the grace for a node to end its ranks: twice what those that cannot be killed take


class Coordinator:
    """The job's course. Nodes are known by the node ranks that were typed on them."""

    def __init__(
        self,
        rules: Rules,
        hello: Hello,
        run_id: str,
        tell: Callable[[int, Message], None],
        drop: Callable[[int], None],
        after: Callable[[float, Callback], Timer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``hello`` is node 0's own; ``after`` and ``clock`` are the loop's.

        ``tell`` sends to a node; ``drop`` disconnects one that is lost to the job though it is still connected.
        """
        self._rules, self._run_id, self._own = rules, run_id, hello
        self._drop, self._clock = drop, clock
        self._seats = seats = Seats(rules, tell)
        self._inspections = JobInspections(seats, after)
        self._profiles = JobProfiles(seats, after)
        self._stage, self._attempt = Stage.JOINING, JobAttempt()
        self._membership = Membership(seats)
        self._restarts = Restarts(rules)
        self._limits = TimeLimits(run_id, seats, self._inspections, after, self._cut, clock)
        self._interrupted: int | None = None
        self._reason: str | None = None  # why, where a rank wants it
        self._hurried = self._preemption_seen = False  # whether it was again; whether a rank asked for a preemption
        self._preempted: str | None = None  # by what: "SIGUSR2 on node 1"
        timers = Timers(after)
        self._after, self._cancel = timers.after, timers.cancel
        kind = hello.share.kind
        self._late = LateNodes(seats, kind, self._after, lambda: self._stage is Stage.RUNNING)
        if rules.checks:
            from ddplaunch.control.checks import Checks

            self._checks = Checks(seats, self._membership, self._after, self._begin, self._end)
        self._before: Verdict | None = None  # of the attempt before, where it failed
        self._joining = Joining(seats, kind, self._after, clock, self._start, self._give_up)

    # ---------------------------------------------------------------------------------------------------- joining

    def open(self) -> None:
        self._seats[0] = Seat(0, self._own)  # whichever rank this node has in a job whose nodes do not join
        self._joining.begin()

    def admit(self, hello: Hello) -> Hello | messages.Refused:
        """Return the hello of a node that may ``join``, with a node rank where it asked for one, or why it may not.

        A refusal before the start ends the job.
        """
        hello = self._seats.numbered(hello)
        refused = agreement.refusal(self._own, hello, self._seats, self._stage)
        if refused and self._stage is Stage.JOINING:
            self._refuse(refused.message, refused.hint)
        return refused or hello

    def decline(self, declined: messages.Declined) -> messages.Refused:
        """Do without a node that cannot take part, or before the start end the job; return the answer to it."""
        if declined.run_id != self._own.run_id:
            return messages.Refused("this is another job", "give every node of a job the same --run-id")
        refused = messages.Refused(declined.says, declined.hint)
        if self._stage is Stage.JOINING:
            self._refuse(refused.message, refused.hint)
        elif self._stage is not Stage.ENDED:
            self._seats.note(f"{declined.says}; it does not take part")
        return refused

    def join(self, hello: Hello) -> None:
        self._seats.add(hello)
        for warning in agreement.warnings(self._own, hello):
            self._seats.note(warning)
        if self._stage is Stage.JOINING:
            self._joining.check()
        elif self._stage is Stage.CHECKING or (self._rules.checks and self._grows):
            self._checks.ask(hello.share.node_rank)
        elif self._grows:
            self._grow(hello.share.name)
        elif self._stage is Stage.RUNNING and not self._seats.all_run():
            self._seats.note(f"{hello.share.name} has joined, but the job is about to end")
        else:
            self._seats.note(self._membership.welcome(self._seats[hello.share.node_rank]))

    @property
    def _grows(self) -> bool:
        """Whether a node that joins now interrupts the attempt."""
        wanted = self._rules.grow and self._membership.has_room
        return wanted and self._stage is Stage.RUNNING and self._seats.all_run()

    def _grow(self, name: str) -> None:
        self._attempt.growing = True
        self._seats.note(f"{name} has joined: stopping the ranks, to start again with it")
        self._stop(signal.SIGTERM)

    # --------------------------------------------------------------------------------------------------- an attempt

    def _start(self) -> None:
        self._cancel()
        if not self._rules.checks:
            return self._begin()
        self._enter(Stage.CHECKING)
        self._checks.begin(self._attempt.number + 1)

    def _checked(self, seat: Seat, attempt: int) -> None:
        if self._stage is Stage.CHECKING:
            self._checks.answered(seat.number, attempt)
        elif self._grows and seat.part is Part.IDLE:
            self._grow(seat.name)

    def _begin(self) -> None:
        self._enter(Stage.RUNNING)
        self._cancel()
        line = self._membership.begin()
        shares = self._seats.start(line)
        nodes = {seat.number for seat in line}
        self._attempt = JobAttempt(self._attempt.number + 1, line[-1].ranks.stop, self._clock(), nodes, set(nodes))
        self._limits.begin(self._attempt.number)
        number, places = self._attempt.number, share.places(shares)
        for seat, place in zip(line, places, strict=True):
            # Node 0 comes first: it removes a store in a file before anybody can open it.
            order = messages.Start(number, self._run_id, place, shares=() if seat.number else shares)
            self._seats.tell(seat.number, order)

    def hear(self, number: int, message: messages.FromNode) -> None:
        """Take in what a node says; raises Garbled, before anything is done, where it cannot be so."""
        seat = self._seats.get(number)
        if seat is None or self._stage is Stage.ENDED:
            return
        if isinstance(message, messages.Interrupted):
            return self._interrupt(number, message)
        if isinstance(message, messages.Warned):
            return self._warned(seat, message.signal)
        if isinstance(message, messages.Unable):
            return self._unable(seat, message)
        if isinstance(message, messages.Checked):
            return self._checked(seat, message.attempt)
        if isinstance(message, messages.Inspect | messages.Inspected):
            return self._inspections.hear(number, message)
        if isinstance(message, messages.TakeProfile | messages.Profiled):
            return self._profiles.hear(number, message)
        if isinstance(message, Beat | Arrived | ForRanks) or message.attempt != self._attempt.number:
            return
        if number and isinstance(message, messages.Failed | messages.Finished | messages.Drained):  # our own we know
            seat.check(message, {each.rank for each in self._attempt.failures})
        match message:
            case messages.Failed(failure=failure, clock=clock):
                self._failed(failure, clock)
            case messages.Finished():
                self._finished(seat)
            case messages.Drained():
                self._drained(seat, message)
            case _:
                self._limits.take(number, message)

    def _unable(self, seat: Seat, message: messages.Unable) -> None:
        if self._stage is Stage.CHECKING or (self._rules.checks and self._stage is Stage.PAUSING):
            return self._checks.failed(seat, message, self._before, first=self._attempt.number < 0)
        text = f"{seat.name}: {message.message}" if self._rules.several else message.message
        if seat.part is not Part.IDLE or self._stage not in (Stage.RUNNING, Stage.STOPPING):
            return self._refuse(text, message.hint)
        del self._seats[seat.number]  # it has come late
        self._seats.note(f"{text}; it does not take part")
        self._seats.tell(seat.number, messages.End(Outcome(EXIT_USAGE, refused=(text, message.hint))))

    def _failed(self, failure: Failure, clock: float) -> None:
        self._attempt.failed(failure, clock)
        if self._stage is not Stage.RUNNING or self._preempted:  # others may be writing a checkpoint
            return
        if not failure.is_consequence:
            self._after(EARLY_REPORT, self._tell_failure)
            self._stop(signal.SIGTERM)
        elif len(self._attempt.failures) == 1:
            self._inspections.before_stop(self._attempt, self._check_drained)
            self._after(SETTLE, lambda: self._stop(signal.SIGTERM))

    def _tell_failure(self) -> None:
        """Ranks take their time to stop: say by now why they must."""
        verdict = self._attempt.verdict
        other_cause = self._interrupted is not None or self._attempt.cause
        if self._stage in (Stage.RUNNING, Stage.STOPPING) and verdict and not other_cause:
            busy = [seat.name for seat in self._seats.values() if seat.part is not Part.DRAINED]
            nodes = busy if self._rules.several else ()
            headline = verdict.headline(several=self._rules.several)
            self._seats.note(early_report(headline, self._rules.grace, nodes))

    def _finished(self, seat: Seat) -> None:
        if seat.part is Part.RUNNING:
            seat.enter(Part.FINISHED)
        self._attempt.working.discard(seat.number)
        if not self._attempt.working:
            self._await_drained(self._rules.grace)
        else:
            self._limits.finished()
            self._late.finished(self._attempt.number)

    def _drained(self, seat: Seat, message: messages.Drained) -> None:
        seat.enter(Part.DRAINED)
        self._attempt.drained(seat.number, message)
        self._preemption_seen |= message.preemption_seen
        if seat.leaving:
            self._seats.let_go(seat)
        elif message.broken:
            self._attempt.broke(message, seat, f" (on {seat.host})" if len(self._seats) > 1 else "")
            self._stop(signal.SIGTERM)
        self._check_drained()

    def lost(self, number: int, why: str, silence: float = 0.0) -> None:
        """A node has gone, or nothing was heard of it for ``silence`` seconds."""
        if number not in self._seats or self._stage is Stage.ENDED:
            return
        seat = self._seats.pop(number)
        self._attempt.gone(number)
        self._limits.debugged(number, busy=False)
        self._inspections.gone(number)
        self._profiles.gone(number)
        if self._stage is Stage.JOINING:
            self._seats.note(f"{seat.name} has left: {why}")
            return self._joining.check()
        if seat.leaving:
            return self._checks.gone(number) if self._stage is Stage.CHECKING else self._check_drained()
        if seat.part is Part.DRAINED and not self._attempt.failures and self._stage is Stage.RUNNING:
            return self._check_drained()  # it had done its work
        text = f"{seat.name} was lost: {why}"
        if self._stage in BEFORE_RANKS:
            if self._membership.too_few:
                return self._give_up(text)
            self._membership.changes += 1
            self._seats.note(text)
            return self._checks.gone(number) if self._stage is Stage.CHECKING else None
        if seat.part is Part.IDLE:
            return self._seats.note(text) if self._rules.spares else None  # it took no part yet
        self._attempt.lost.append(Loss(time.time() - silence, number, seat.host, text))
        self._seats.tell(0, messages.NodeLost(seat.host))
        self._membership.failed(seat)
        self._seats.note(f"{text}; stopping the others" if self._stage is Stage.RUNNING else text)
        self._stop(signal.SIGTERM)
        self._check_drained()

    def _interrupt(self, number: int, message: messages.Interrupted) -> None:
        seat = self._seats[number]
        for_job = message.signal != signal.SIGTERM or message.reason or self._interrupted is not None or self._preempted
        if not for_job and self._membership.can_leave(seat, self._stage):
            return None if seat.leaving else self._leave(seat)
        # Slurm and Kubernetes signal every node at once: only the second signal on one node means "now".
        if first := self._interrupted is None:
            self._interrupted = message.signal
            self._reason = f"stopped because {message.reason}" if message.reason else None
            name = "Ctrl-C" if message.signal == signal.SIGINT else signal_name(message.signal)
            self._seats.note(f"{message.reason or name} on {seat.name}", but=number)
        again = message.again and not first  # what came before may only have taken that node away
        # When hurried again, others are not waited for any longer: End ends what they still have.
        if self._stage in BEFORE_RANKS or (self._hurried and again):
            return self._end(Outcome(EXIT_SIGNAL + self._interrupted))
        self._hurried |= again
        if first or again:
            self._stop(self._interrupted, 0.0 if again else self._rules.grace)

    def _leave(self, seat: Seat) -> None:
        """Have the job go on without a node that was sent a SIGTERM."""
        seat.leaving = True
        if seat.part is Part.RUNNING:
            self._attempt.leaves(seat)
            self._seats.note(f"SIGTERM on {seat.name}: it leaves the job; stopping the ranks, to go on without it")
            self._stop(signal.SIGTERM)
        elif not seat.has_ranks:  # its launcher ends without waiting for us
            if self._stage is not Stage.JOINING:
                self._seats.note(seat.has_left)
            self._drop(seat.number)
            self.lost(seat.number, "SIGTERM")

    def _warned(self, seat: Seat, number: int) -> None:
        """The job must make room. Ranks may save what they have; from now on none is stopped for another's failure."""
        if self._preempted is not None:
            return
        self._preempted = signal_name(number) + (f" on {seat.name}" if self._rules.several else "")
        if self._stage in BEFORE_RANKS:
            return self._end(Outcome(EXIT_PREEMPTED, remark=f"preempted by {self._preempted}: no rank was running"))
        seconds = f"{self._rules.preempt_grace:g} s (--preempt-grace)"
        self._seats.note(f"{self._preempted}: the job must make room; its ranks have {seconds} for a checkpoint")
        self._seats.tell_all(messages.Preempt(self._attempt.number))
        self._after(self._rules.preempt_grace, self._preempt_grace_over)

    def _preempt_grace_over(self) -> None:
        if self._stage is Stage.RUNNING:
            self._seats.note(f"{self._rules.preempt_grace:g} s have passed (--preempt-grace): stopping the ranks")
            self._stop(signal.SIGTERM)

    def _stop(self, number: int, grace: float | None = None) -> None:
        later = partial(self._stop_later, self._attempt, number, grace)
        in_time = self._stage is Stage.RUNNING and grace != 0 and not self._preempted
        if in_time and self._inspections.before_stop(self._attempt, later):
            return
        if self._stage is Stage.RUNNING:
            self._enter(Stage.STOPPING)
        elif self._stage is not Stage.STOPPING or grace is None:
            return
        order = messages.Stop(self._attempt.number, number, self._rules.grace if grace is None else grace)
        for node, seat in list(self._seats.items()):
            if seat.has_ranks:
                self._seats.tell(node, order)
        self._await_drained(order.grace)

    def _stop_later(self, attempt: JobAttempt, number: int, grace: float | None) -> None:
        """The ranks have been inspected."""
        if attempt is self._attempt:
            self._stop(number, grace)
            self._check_drained()

    def _await_drained(self, grace: float, waited: float = 0.0) -> None:
        """Give up what has not ended its ranks when they should all have; a node that beats may yet be broken."""
        if waited < (limit := grace + OVERDUE):  # in steps: of a time in which we were stopped ourselves one counts
            step = min(5.0, limit - waited)
            return self._after(step, partial(self._await_drained, grace, waited + step))
        for number in sorted(self._attempt.undrained - {0}):
            self._drop(number)
            self.lost(number, f"it has not said in {limit:g} s that its ranks have ended")

    def _cut(self, cut: Cut) -> None:
        """A time limit is over."""
        if self._stage in BEFORE_RANKS:
            self._end(Outcome(EXIT_TIMEOUT, remark=cut.text))
        elif self._stage is Stage.RUNNING and not (self._preempted or self._attempt.inspecting):
            self._attempt.cut = cut
            if cut.inspection is not None:
                self._inspections.keep(self._attempt, cut.inspection)
            if cut.failure is None:
                self._seats.note(f"{cut.text}: stopping the ranks")
            self._after(EARLY_REPORT, self._tell_failure)
            self._stop(signal.SIGTERM)

    # -------------------------------------------------------------------------------------------------- what follows

    def _check_drained(self) -> None:
        if self._attempt.inspecting:
            return
        if self._stage in (Stage.RUNNING, Stage.STOPPING) and not self._attempt.undrained:
            self._cancel()
            self._decide()

    def _decide(self) -> None:
        """Nothing of the attempt is left anywhere."""
        attempt, verdict = self._attempt, self._attempt.verdict
        whole = self._stage is Stage.RUNNING and attempt.whole
        if self._interrupted is not None:
            why = "; ".join(filter(None, (self._reason, attempt.waits)))
            self._end(Outcome(EXIT_SIGNAL + self._interrupted, remark=why or None))
        elif self._preempted and not (whole and not self._preemption_seen):
            remark = f"preempted by {self._preempted}: the same command may be run again (exit code {EXIT_PREEMPTED})"
            self._end(Outcome(EXIT_PREEMPTED, verdict, remark=remark))
        elif broken := attempt.broken_first:
            self._restart(None, broken)
        elif cause := attempt.cause:
            self._regroup(cause.text)
        elif attempt.cut and not attempt.cut.restarts:
            self._end(attempt.outcome_of_cut)
        elif verdict is None and attempt.growing:
            self._regroup("")
        elif verdict is None:
            self._end(Outcome(0))
        elif verdict.first.refused:
            self._end(Outcome(EXIT_USAGE, refused=verdict.first.refused))
        else:
            self._restart(verdict, None)

    def _restart(self, verdict: Verdict | None, broken: Loss | None) -> None:
        """A rank failed, or else a launcher's own processes were lost: start all ranks again, or end."""
        decision = self._restarts.after(self._attempt, self._clock() - self._attempt.began, late=self._limits.over)
        wait, why_not = decision.wait, decision.remark
        if wait is not None and (few := self._membership.blame(verdict, broken)):
            wait, why_not = None, f"{few} to start again"
        what = verdict.headline(several=self._rules.several) if verdict else broken.text if broken else ""
        if wait is None:
            code = verdict.first.code if verdict else EXIT_SIGNAL + signal.SIGKILL
            remark = why_not if verdict else "; ".join(filter(None, (what, why_not)))
            return self._end(Outcome(code, verdict, remark=remark))
        text = f"{what}\n{self._restarts.announce(wait)}"
        self._seats.tell_all(messages.Restarting(self._attempt.number + 1, wait, text, verdict))
        self._pause(wait, verdict)

    def _regroup(self, why: str) -> None:
        if self._limits.over:
            return self._end(Outcome(EXIT_TIMEOUT, remark=f"{why}; the time of the job is over (--timeout)"))
        if over := self._membership.change(why):
            return self._give_up(over)
        self._seats.note(self._membership.going_on)
        self._pause(0, None)

    def _pause(self, seconds: float, before: Verdict | None) -> None:
        self._enter(Stage.PAUSING)
        self._before = before
        self._seats.rest()
        self._attempt = JobAttempt(self._attempt.number)
        self._after(seconds, self._start)

    def _give_up(self, why: str) -> None:
        self._end(Outcome(EXIT_UNAVAILABLE, remark=why))

    def _refuse(self, message: str, hint: str | None) -> None:
        self._end(Outcome(EXIT_USAGE, refused=(message, hint)))

    def _end(self, outcome: Outcome) -> None:
        self._enter(Stage.ENDED)
        self._cancel()
        self._limits.end()
        self._seats.tell_all(messages.End(outcome))

    def _enter(self, stage: Stage) -> None:
        assert stage in NEXT_STAGE[self._stage], f"{self._stage} to {stage}"
        self._stage = stage
