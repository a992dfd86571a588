"""Tests of when stragglers are inspected and how they are named, with ranks and timers that the test sets."""

from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.core.job.node_table import NodePhase
from ddplaunch.core.node.node_attempt import AttemptPhase
from ddplaunch.observe.diagnosis.inspection import Inspection, ProcessCondition, RankInspection
from ddplaunch.observe.job.straggler_limit import STRAGGLER_CHECK, StragglerLimit
from ddplaunch.observe.messages import StragglersFound
from ddplaunch.observe.node.straggler_monitor import FAILED_S, NAME_DELAY_S, StragglerMonitor
from ddplaunch.observe.options import Hangs


class Node:
    """Ten ranks; its timers expire when the test says so."""

    def __init__(self, nnodes: int, timeout: float | None) -> None:
        self.timers: list[Any] = []  # that run
        self.notes: list[str] = []
        self.sent: list[object] = []
        self.stopped = {9}
        ranks = [SimpleNamespace(rank=number, host="n1") for number in range(10)]
        self.ranks = SimpleNamespace(
            number=3,
            plan=SimpleNamespace(nnodes=nnodes),
            attempt=SimpleNamespace(phase=AttemptPhase.RUNNING, not_spawned=0, failures=[]),
            processes={each.rank: SimpleNamespace(rank=each, pid=100 + each.rank) for each in ranks},
            exit_codes={},
            is_holding=False,
            is_stop_requested=self.stopped.__contains__,
            rank_file_path=lambda rank, kind: None,
            timers=self,
        )
        found = [RankInspection(n, "n1", 100 + n, ProcessCondition.ALIVE, no_stack="no stack") for n in range(10)]
        monitor: Any = StragglerMonitor
        self.monitor = monitor(
            self,
            self.ranks,
            timeout,
            lambda ranks, on_done: on_done(Inspection(0.0, tuple(found), 10)),
            self.sent.append,
            self.notes.append,
        )

    def guard(self, callback: Any) -> Any:
        return callback

    def call_later(self, seconds: float, callback: Any) -> SimpleNamespace:
        timer = SimpleNamespace(seconds=seconds, callback=callback)
        timer.cancel = lambda: self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def expire(self, seconds: float) -> None:
        (timer,) = (each for each in self.timers if each.seconds == seconds)
        timer.cancel = lambda: None
        self.timers.remove(timer)
        timer.callback()

    def delays(self) -> list[float]:
        return [each.seconds for each in self.timers]


@pytest.mark.parametrize(("nnodes", "where"), [(1, ""), (2, " on n1")])
def test_eight_stragglers_are_listed(nnodes, where):
    node = Node(nnodes, 900.0)
    node.monitor.start_timers()
    assert node.delays() == [NAME_DELAY_S], "no rank has ended yet"
    node.ranks.exit_codes[9] = 0
    node.monitor.start_timers()
    assert node.delays() == [NAME_DELAY_S, 900.0]
    node.expire(NAME_DELAY_S)
    listed = "; ".join(f"rank {number} (pid {100 + number})" for number in range(8))
    assert node.notes == [f"the other ranks{where} are done; waiting for {listed} and 1 more"]
    node.stopped.add(8)
    node.monitor._on_report_delay()
    assert node.notes[1:] == [f"the other ranks{where} are done; waiting for {listed}"]
    node.expire(900.0)
    assert node.sent == [StragglersFound(3)]


def test_ranks_that_a_user_holds_or_that_are_stopped_are_no_stragglers():
    node = Node(1, 900.0)
    node.ranks.exit_codes[9] = 0
    node.monitor.start_timers()
    node.ranks.is_holding = True
    for seconds in (NAME_DELAY_S, 900.0):
        node.expire(seconds)
        assert node.delays() == [NAME_DELAY_S, 900.0], "again from now on"
    node.ranks.is_holding = False
    node.ranks.attempt.not_spawned = 1
    node.expire(NAME_DELAY_S)
    assert node.delays() == [NAME_DELAY_S, 900.0], "another rank is still to be started"
    node.ranks.attempt.not_spawned = 0
    node.ranks.attempt.failures.append("rank 9 has failed")
    for seconds in (NAME_DELAY_S, 900.0):
        node.expire(seconds)
    node.monitor.start_timers()
    assert (node.delays(), node.notes, node.sent) == ([], [], [])


@pytest.mark.parametrize(("nnodes", "where"), [(1, ""), (2, " on n1")])
def test_ranks_that_failed_and_still_run_are_listed(nnodes, where):
    node = Node(nnodes, None)
    node.ranks.on_failed(9, "ValueError")
    node.expire(FAILED_S)
    assert node.notes == [], "it is being stopped"
    for number in range(9):
        node.ranks.on_failed(number, "sys.exit(3)" if number else "ValueError")
    assert node.delays() == [FAILED_S]
    node.ranks.is_holding = True
    node.expire(FAILED_S)
    assert (node.delays(), node.notes) == ([FAILED_S], [])
    node.ranks.is_holding = False
    node.expire(FAILED_S)
    pids = ", ".join(str(100 + number) for number in range(1, 9))
    assert node.notes == [
        f"rank 0{where} (pid 100) has raised ValueError, but is still running: no stack",
        f"ranks 1 to 8{where} (pids {pids}) have called sys.exit(3), but are still running: no stack",
    ]


def test_ranks_that_fail_in_the_same_way_one_after_the_other_are_named_once():
    node = Node(1, None)
    for number, what in enumerate(("ValueError", "ValueError", "KeyError")):
        node.ranks.on_failed(number, what)
        node.expire(FAILED_S)
    assert [note.partition(" (")[0] for note in node.notes] == ["rank 0", "rank 2"]


def test_many_ways_to_fail_are_bounded():
    node = Node(1, None)
    for number in range(9):
        node.ranks.on_failed(number, f"Error{number}")
    node.expire(FAILED_S)
    assert len(node.notes) == 9
    assert node.notes[-1] == "1 more rank failed, but did not exit"


@pytest.mark.parametrize(
    ("timeout", "others", "expected"),
    [
        (900.0, [NodePhase.RUNNING], {STRAGGLER_CHECK: 900.0}),
        (900.0, [NodePhase.FINISHED, NodePhase.RUNNING], {STRAGGLER_CHECK: 900.0}),
        (900.0, [NodePhase.FINISHED, NodePhase.DRAINED], {}),
        (900.0, [], {}),
        (None, [NodePhase.RUNNING], {}),
        (None, [NodePhase.FINISHED], {}),
    ],
)
def test_a_node_that_has_finished_sets_a_deadline_for_those_that_run(timeout, others, expected):
    deadlines: dict[str, float] = {}
    phases = [NodePhase.FINISHED, *others]
    context: Any = SimpleNamespace(
        nodes={number: SimpleNamespace(phase=phase) for number, phase in enumerate(phases)},
        options={Hangs: Hangs(straggler_timeout=timeout)},
        set_deadline=deadlines.__setitem__,
    )
    StragglerLimit(context, lambda cause, inspection: None).on_ranks_finished()
    assert deadlines == expected
