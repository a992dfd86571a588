"""Random histories of a node: whatever comes in whatever order, the job ends, and nothing of it is left.

``DDPLAUNCH_HISTORIES`` sets how many are played; the seed of one that fails is in the name of the assertion.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

import pytest

from ddplaunch.core import messages
from ddplaunch.core.events import JobEnded
from ddplaunch.core.failures import JobResult
from ddplaunch.core.machine import MachineEvent
from ddplaunch.core.node import commands as do
from ddplaunch.core.node import node_events as ev
from ddplaunch.core.node.node_attempt import RUNNING_PHASES, AttemptPhase
from tests.core.node.machine_world import World, is_over

HISTORIES = int(os.environ.get("DDPLAUNCH_HISTORIES", "2500"))
MAX_STEPS = 400
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGTSTP)


class RandomNode:
    """A node with processes, a zygote and a node 0 that act at random, as far as they could in the world."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        self.world = World(
            range(choose((1, 2, 3, 12))),
            grace_s=choose((0.0, 1.0, 30.0)),
            inspects_before_stop=choose((False, True)),
            preempt_signal=choose((None, signal.SIGUSR1, signal.SIGTERM)),
            preempt_forward=choose((None, signal.SIGUSR2)),
        )
        self.world.output_open = choose((False, True))
        self.attempt = -1
        self.zygote = "absent"  # or importing, ready, sweeping
        self.requested: list[int] = []  # ranks that the zygote is to spawn
        self.alive: dict[int, int] = {}  # pid by rank
        self.spawned_in: dict[int, set[int]] = {}  # ranks that were requested, by attempt
        self.codes: dict[int, int] = {}  # how ranks of this attempt have ended
        self.killed: set[int] = set()  # ranks that the zygote has killed in this attempt
        self.to_node_zero: list[object] = []
        self.is_ended_by_node_zero = False
        self.pid = 100
        self.ended = 0
        self.reports: list[int] = []

    # ------------------------------------------------------------------------------------------------ what happens

    def play(self) -> None:
        """Play to the end; assert what must hold at each step and at the end."""
        self.give(ev.MessageReceived(0, messages.JoinAccepted("id", 15.0)))
        for step in range(MAX_STEPS):
            if is_over(self.world):
                break
            actions = self.actions()
            if step > MAX_STEPS // 2:  # time for the end
                actions = [*actions, self.end_job, self.pass_time, self.let_zygote_go_on] * 3
            self.random.choice(actions)()
        else:
            for action in (self.end_job, self.let_zygote_go_on, self.pass_time) * MAX_STEPS:
                action()
        assert is_over(self.world), "the job does not end"
        assert self.ended == 1
        assert not self.alive, "a rank is left"
        assert len(set(self.reports)) == len(self.reports), "an attempt was reported twice"
        assert self.world.machine.wake_at() is None
        self.give(ev.DeadlineDue())
        self.give(ev.SignalArrived(signal.SIGINT))

    def actions(self) -> list[Callable[[], None]]:
        always = [self.pass_time, self.let_zygote_go_on, self.let_rank_end, self.let_node_zero_act]
        rare = [self.signal_launcher, self.lose_zygote, self.close_output, self.old_message, self.end_store]
        return always * 6 + rare

    def give(self, event: MachineEvent) -> None:
        for command in self.world.on(event):
            self.execute(command)
        attempt = self.world.machine.attempt
        assert not (attempt.phase in RUNNING_PHASES and attempt.is_idle), "the end of the last rank was not noticed"

    def pass_time(self) -> None:
        until = self.world.now + self.random.choice((0.05, 0.5, 2.0, 40.0))
        for command in self.world.wait_until(until):
            self.execute(command)

    def let_zygote_go_on(self) -> None:
        """The zygote does the next thing that it is to do."""
        if self.zygote == "importing":
            self.zygote = "ready"
            self.give(ev.ZygoteStarted(True))
        elif self.zygote in ("ready", "sweeping") and self.requested:
            rank = self.requested.pop(0)
            if self.random.random() < 0.1:
                return self.give(ev.SpawnFailed(rank, 11, "too many processes"))
            self.pid += 1
            self.alive[rank] = self.pid
            self.give(ev.ProcessSpawned(rank, self.pid))
        elif self.zygote == "sweeping":
            if self.random.random() < 0.1:
                return  # it is slow
            for rank in list(self.alive):
                self.killed.add(rank)
                self.end_rank(rank, -signal.SIGKILL)
            if self.zygote == "sweeping":
                self.zygote = "ready"
                self.give(ev.ProcessesSwept(self.random.choice(((), ("sleep (pid 9)",)))))

    def let_rank_end(self) -> None:
        if self.alive and self.zygote in ("ready", "sweeping"):
            self.end_rank(self.random.choice(list(self.alive)), self.random.choice((0, 0, 0, 1, -11, -15, 75)))

    def end_rank(self, rank: int, code: int) -> None:
        if self.random.random() < 0.2:
            self.world.recorded[rank] = "ValueError: x"
        self.codes[rank] = code
        self.give(ev.ProcessExited(rank, self.alive.pop(rank), code))

    def lose_zygote(self) -> None:
        if self.zygote != "absent" and self.random.random() < 0.2:
            self.remove_zygote()
            self.give(ev.ZygoteLost("it was ended by SIGKILL"))

    def remove_zygote(self) -> None:
        self.zygote = "absent"
        self.alive.clear()
        self.requested.clear()

    def signal_launcher(self) -> None:
        if self.random.random() < 0.3:
            number = self.random.choice(SIGNALS)
            self.give(ev.SignalArrived(number, from_terminal=self.random.random() < 0.5))
        elif self.zygote in ("ready", "sweeping"):
            rank = self.random.choice([None, *self.alive])
            self.give(ev.ZygoteSignalled(self.random.choice((signal.SIGTERM, signal.SIGUSR2)), rank))
        else:
            self.give(ev.ForwardableSignalArrived(signal.SIGUSR2))

    def close_output(self) -> None:
        self.give(ev.OutputDrained())

    def end_store(self) -> None:
        if self.zygote == "ready" and self.random.random() < 0.1:
            self.give(ev.StoreExited(7, -9))

    # ------------------------------------------------------------------------------------------------------- node 0

    def let_node_zero_act(self) -> None:
        """Node 0 reads what the node has sent, and starts an attempt, stops it or ends the job."""
        if self.is_ended_by_node_zero:
            return
        sent, self.to_node_zero = self.to_node_zero, []
        reported = any(isinstance(message, messages.AttemptReport) for message in sent)
        if self.attempt < 0 or (reported and self.random.random() < 0.5):
            self.attempt += 1
            self.codes.clear()
            self.killed.clear()
            self.give(ev.MessageReceived(0, messages.StartAttempt(self.attempt, "id")))
        elif reported or (sent and self.random.random() < 0.05):
            self.end_job()
        elif any(isinstance(each, messages.FailureReported | messages.StopRequested) for each in sent):
            number = self.random.choice((signal.SIGTERM, signal.SIGINT))
            grace_s = self.random.choice((0.0, 1.0, 30.0))
            self.give(ev.MessageReceived(0, messages.StopAttempt(self.attempt, number, grace_s)))
        elif any(isinstance(each, messages.PreemptionNotice) for each in sent):
            self.give(ev.MessageReceived(0, messages.PreemptRanks(self.attempt)))
        elif any(isinstance(each, messages.ForwardSignal) for each in sent):
            self.give(ev.MessageReceived(0, messages.ForwardSignal(signal.SIGUSR2, self.random.random() < 0.5)))

    def end_job(self) -> None:
        if not self.is_ended_by_node_zero:
            self.is_ended_by_node_zero = True
            self.give(ev.MessageReceived(0, messages.EndJob(JobResult(1))))

    def old_message(self) -> None:
        if self.attempt > 0:
            self.give(ev.MessageReceived(0, messages.StopAttempt(self.attempt - 1, signal.SIGTERM, 0.0)))

    # ----------------------------------------------------------------------------------------------------- commands

    def execute(self, command: do.Command) -> None:
        """Change the world as the command does; assert that it makes sense there."""
        if self.ended:
            assert isinstance(command, do.EndWaits | do.SuspendJob), f"{command} after the end"
        match command:
            case do.PrepareAttempt() if self.zygote == "absent":
                self.zygote = "importing"
            case do.SpawnRank(rank=rank):
                assert self.zygote == "ready", "a rank was requested from no zygote"
                requested = self.spawned_in.setdefault(self.attempt, set())
                assert rank not in requested, "a rank was requested twice"
                requested.add(rank)
                self.requested.append(rank)
            case do.StopRank(rank=rank):
                assert rank in self.alive
            case do.Sweep():
                assert self.zygote in ("ready", "sweeping")
                self.zygote = "sweeping"
            case do.KillZygote():
                assert self.zygote == "sweeping"
                self.remove_zygote()
            case do.CloseZygote():
                assert not self.alive, "the zygote of running ranks was closed"
                self.zygote = "absent"
            case do.Send(message=messages.AttemptReport() as report):
                assert not self.alive, "an attempt with a running rank was reported"
                self.reports.append(report.attempt)
                self.to_node_zero.append(report)
            case do.Send(message=messages.RanksFinished() as finished):
                expected = {rank.rank for rank in self.world.ranks}
                assert set(self.codes) == expected
                assert set(self.codes.values()) <= {0, 75}, "a failure was reported as a success"
                self.to_node_zero.append(finished)
            case do.Send(message=messages.FailureReported(failure=failure) as reported):
                assert failure.message or failure.rank not in self.killed, "a killed rank counts as failed"
                self.to_node_zero.append(reported)
            case do.Send(message=message):
                self.to_node_zero.append(message)
            case do.Emit(event=JobEnded()):
                assert not self.alive, "the job ended with a running rank"
                self.ended += 1


@pytest.mark.parametrize("block", range(10))
def test_every_history_ends(block):
    for seed in range(block * HISTORIES // 10, (block + 1) * HISTORIES // 10):
        node = RandomNode(seed)
        try:
            node.play()
        except AssertionError as error:
            raise AssertionError(f"history {seed}, in {node.world.machine.phase}: {error}") from error


def test_the_histories_reach_every_phase():
    phases = set()
    for seed in range(30):
        node = RandomNode(seed)
        give = node.give

        def record(event, give=give, node=node):
            give(event)
            phases.add(node.world.machine.phase)

        node.give = record
        node.play()
    assert phases == set(AttemptPhase)
