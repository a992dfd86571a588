"""A ``NodeMachine`` in a simulated world: replies to its questions, a clock, and its commands as short texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from ddplaunch.base.text import signal_name
from ddplaunch.core import messages
from ddplaunch.core.deadlines import Now
from ddplaunch.core.events import JobEnded
from ddplaunch.core.failures import JobResult
from ddplaunch.core.machine import MachineEvent
from ddplaunch.core.node import commands as do
from ddplaunch.core.node import node_events as ev
from ddplaunch.core.node.machine import NodeMachine
from ddplaunch.core.node.node_attempt import AttemptPhase
from ddplaunch.system.plan.rank_layout import Rank
from tests.core.machine_histories import WALL, MachineWorld, describe_by


class World(MachineWorld):
    """The node around a machine.

    Attributes:
        now: the monotonic clock, in seconds.
        zygote_ready: whether the zygote has started.
        recorded: the message of the exception that ended a rank, also if it was stopped.
        failing: ranks that are handling an exception, which features know of.
        unsent: requests for ranks that the zygote's socket could not take yet.
        output_open: whether a process keeps the output of the ranks open.
    """

    def __init__(
        self,
        ranks: Iterable[int] = (0, 1),
        *,
        grace_s: float = 30.0,
        inspects_before_stop: bool = False,
        preempt_signal: int | None = None,
        preempt_forward: int | None = None,
        log_fails: bool = False,
        recorded: dict[int, str] | None = None,
        failing: Iterable[int] = (),
        unsent: Iterable[int] = (),
        output_open: bool = False,
    ) -> None:
        self.machine = NodeMachine(
            grace_s=grace_s,
            inspects_before_stop=inspects_before_stop,
            preempt_signal=preempt_signal,
            preempt_forward=preempt_forward,
        )
        self.ranks = tuple(Rank(rank, rank, 0, "n0", "cpu", None) for rank in ranks)
        self.zygote_ready = False
        self.log_fails, self.output_open = log_fails, output_open
        self.recorded = recorded or {}
        self.failing, self.unsent = {*failing}, {*unsent}

    def on(self, event: MachineEvent) -> list[do.Command]:
        """Give the machine an event, and what follows from it in the same turn; return all its commands."""
        if isinstance(event, ev.ZygoteStarted | ev.ZygoteLost):
            self.zygote_ready = isinstance(event, ev.ZygoteStarted)
        done: list[do.Command] = []
        replies, inbox = deque([event]), deque[MachineEvent]()
        while waiting := replies or inbox:
            for command in self.machine.on(waiting.popleft(), Now(self.now, WALL + self.now)):
                done.append(command)
                if (reply := self._reply(command)) is not None:
                    replies.append(reply)
                if isinstance(command, do.DrainOutput) and not self.output_open:
                    inbox.append(ev.OutputDrained())
        return done

    def describe_all(self, commands: Sequence[do.Command]) -> list[str]:
        return describe_by(describe, commands)

    def _reply(self, command: do.Command) -> MachineEvent | None:
        match command:
            case do.PrepareAttempt():
                return ev.AttemptPrepared(self.ranks, self.zygote_ready)
            case do.OpenLog() if self.log_fails:
                return ev.StartFailed("no space left", is_final=True)
            case do.WithdrawSpawns():
                withdrawn, self.unsent = tuple(sorted(self.unsent)), set()
                return ev.SpawnsWithdrawn(withdrawn)
            case do.StopRanks(spare_failing=spare):
                return ev.StopSent(tuple(set(self.machine.attempt.live) - (self.failing if spare else set())))
            case do.ExplainEnd():
                failure = command.failure
                if message := self.recorded.get(failure.rank):
                    failure = replace(failure, message=message)
                is_stopped = command.stopped and failure.message is None
                return ev.EndExplained(failure.rank, None if is_stopped else failure)
            case do.KillZygote():
                self.zygote_ready = False
                return ev.ZygoteLost()
            case do.KillRemaining():
                return ev.RemainingKilled(())
            case do.CollectOutput():
                return ev.OutputCollected(tuple((rank, ("last line",)) for rank in command.failed))
            case do.CloseZygote():
                self.zygote_ready = False
        return None


def describe(command: do.Command) -> str | None:
    """Describe a command in a few words; None for a question, or if only observers see it."""
    match command:
        case do.SpawnRank(rank=rank):
            return f"spawn {rank}"
        case do.StopRank(rank=rank):
            return f"SIGTERM to {rank}"
        case do.StopRanks(number=number):
            return f"{signal_name(number)} to all" + ", but those that fail" * command.spare_failing
        case do.SignalRanks(number=number):
            return f"forward {signal_name(number)}" + " to handlers" * command.only_handlers
        case do.Sweep(grace_s=grace_s):
            return f"sweep in {grace_s:g} s"
        case do.ShowNote(text=text) | do.ShowFooter(text=text):
            return f"job: {text}" if command.of_job else f"show: {text}"
        case do.EndWaits(delay_s=delay_s):
            return f"wait {delay_s:g} s more"
        case do.Emit(event=JobEnded(code=code)):
            return f"end with {code}"
        case do.Send(message=message):
            return f"send {_describe_message(message)}"
        case do.CreatePreemptionFile():
            return "CreatePreemptionFile" + " or report" * command.report_error
        case do.KillZygote() | do.CloseZygote() | do.SuspendJob() | do.InspectRanks():
            return type(command).__name__
        case do.ShowJobMessages() | do.OpenLog():
            return type(command).__name__
        case do.NotePreemptionHandlers():
            return "note handlers"
    return None


def _describe_message(message: object) -> str:
    match message:
        case messages.FailureReported(failure=failure):
            what = failure.message or failure.exit_code or signal_name(failure.signal or 0)
            return f"failure of {failure.rank}: {what}"
        case messages.AttemptReport():
            words = [f"report {message.attempt}:"]
            words += [f"{lines[0]} of {rank}," for rank, lines in message.tails]
            words += [f"{message.stopped} stopped"] + ["preemption seen"] * message.preemption_seen
            return " ".join(words) + (f", {message.broken.reason}" if message.broken else "")
        case messages.StopRequested(signal=number):
            reason = f" ({message.reason})" if message.reason else ""
            return f"stop request {signal_name(number)}" + " again" * message.again + reason
        case messages.PreemptionNotice(signal=number):
            return f"preemption notice {signal_name(number)}"
        case messages.ForwardSignal(number=number):
            return f"forward request {signal_name(number)}" + " sent to group" * message.sent_to_group
        case messages.NodeStartError(message=text):
            return f"start error: {text}"
    return type(message).__name__


# ------------------------------------------------------------------------------------------------- events, in few words


def started(*, forks: bool = True) -> ev.ZygoteStarted:
    return ev.ZygoteStarted(forks)


def spawned(rank: int, attempt: int = 0) -> ev.ProcessSpawned:
    return ev.ProcessSpawned(rank, pid_of(rank, attempt))


def exited(rank: int, code: int = 0, attempt: int = 0) -> ev.ProcessExited:
    return ev.ProcessExited(rank, pid_of(rank, attempt), code)


def pid_of(rank: int, attempt: int = 0) -> int:
    return 100 * (attempt + 1) + rank


def start(attempt: int = 0) -> ev.MessageReceived:
    return ev.MessageReceived(0, messages.StartAttempt(attempt, "id"))


def stop(number: int = 15, grace_s: float = 30.0, attempt: int = 0) -> ev.MessageReceived:
    return ev.MessageReceived(0, messages.StopAttempt(attempt, number, grace_s))


def end(code: int = 0) -> ev.MessageReceived:
    return ev.MessageReceived(0, messages.EndJob(JobResult(code)))


def preempt(attempt: int = 0) -> ev.MessageReceived:
    return ev.MessageReceived(0, messages.PreemptRanks(attempt))


def is_over(world: World) -> bool:
    """Whether the job has ended on this node, and nothing is left to do."""
    return world.machine.phase is AttemptPhase.ENDED and world.machine.wake_at() is None
