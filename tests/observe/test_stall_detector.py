"""Tests of when the stall detector of a node wakes the launcher, with a clock that the test sets."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from ddplaunch.base.event_loop import Timer
from ddplaunch.core import events
from ddplaunch.core.messages import ProgressResumed
from ddplaunch.core.node.node_attempt import AttemptPhase
from ddplaunch.observe.diagnosis.inspection import (
    ActiveCall,
    Collective,
    Frame,
    GroupState,
    Inspection,
    ProcessCondition,
    RankInspection,
    Thread,
)
from ddplaunch.observe.diagnosis.stall_check import check_stall
from ddplaunch.observe.messages import StallSuspected
from ddplaunch.observe.node import stall_detector
from ddplaunch.observe.node.stall_detector import CPU_NOISE_S, StallDetector
from ddplaunch.observe.node.tree_usage import ThreadTime, TreeUsage
from ddplaunch.observe.options import LONG_WAIT, Hangs


class Node:
    """Two ranks whose collectives and CPU time a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hangs: Hangs) -> None:
        self.now, self.cpu, self.worked = 1000.0, 0.0, 0.0
        self.shares = 0.0, 0.0  # of its time in which rank 1 runs, and waits for a CPU
        self.collectives = (5, 4), (4, 4)
        self.fields: dict[str, object] = {}  # of rank 0
        self.timers: list[Timer] = []
        self.inspections: list[float] = []
        self.sent: list[tuple[float, object]] = []
        clock = SimpleNamespace(time=lambda: self.now + 1e9, monotonic=lambda: self.now)
        monkeypatch.setattr(stall_detector, "time", clock)
        channel = SimpleNamespace(has_thread=True, bytes_received=0, read_pending=lambda: None)
        self.ranks = SimpleNamespace(
            number=0,
            attempt=SimpleNamespace(phase=AttemptPhase.RUNNING),
            plan=SimpleNamespace(local_ranks=[SimpleNamespace(rank=0), SimpleNamespace(rank=1)], master_port=29500),
            last_keep_alive_at=lambda rank: self.worked,
            channels={0: channel, 1: channel},
            processes={number: SimpleNamespace(pid=100 + number) for number in (0, 1)},
        )
        monkeypatch.setattr(
            "ddplaunch.observe.node.stall_detector.read_tree_usage",
            lambda roots, store: {pid: self.usage() if pid == 101 else TreeUsage(0.0, 0) for pid in roots},
        )
        self.notes: list[str] = []
        self.clock = StallDetector(self, hangs, self.inspect, self.send, self.notes.append)  # type: ignore[arg-type]
        self.clock.start_attempt(self.ranks)  # type: ignore[arg-type]

    def usage(self) -> TreeUsage:
        ran, waited = (self.now * share for share in self.shares)
        return TreeUsage(self.cpu + ran, 0, threads={101: ThreadTime(ran, waited)})

    def send(self, message: object) -> None:
        self.sent.append((self.now, message))

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        self.timers.append(Timer(callback, self.now + seconds))
        return self.timers[-1]

    def inspect(self, ranks: object, done: Callable[[Inspection], None]) -> None:
        self.inspections.append(self.now)
        states = [(GroupState("0", entered, completed),) for entered, completed in self.collectives]
        found = [
            RankInspection(number, "n0", 100 + number, ProcessCondition.ALIVE, answers=True, groups=state)
            for number, state in enumerate(states)
        ]
        done(Inspection(0.0, (replace(found[0], **self.fields), found[1]), 2))  # type: ignore[arg-type]

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [each for each in self.timers if each.callback and each.when <= end]:
            first = min(due, key=lambda timer: timer.when)
            self.timers.remove(first)
            self.now = max(self.now, first.when)
            first.callback()  # type: ignore[misc]
        self.now = end


@pytest.fixture
def node(monkeypatch):
    return Node(monkeypatch, Hangs())


def test_a_stall_is_reported_to_node_0_at_growing_intervals(node):
    """Two inspections follow each time that the silence has doubled, and then every five minutes."""
    node.wait(300)
    assert node.inspections == [1020, 1024, 1040, 1044, 1080, 1084, 1160, 1164, 1240, 1300]
    assert node.sent == [(moment, StallSuspected(0)) for moment in (1024, 1044, 1084, 1164, 1300)]
    node.wait(3600)
    assert len(node.sent) == 5 + 10


def test_with_a_shorter_stall_timeout_there_is_no_earlier_inspection(monkeypatch):
    node = Node(monkeypatch, Hangs(stall_timeout=20.0))
    node.wait(20)
    assert node.inspections == [1016, 1020]
    assert node.sent == [(1020, StallSuspected(0))]


def test_ranks_that_print_are_inspected_every_five_minutes(node):
    """Ranks that wait count as stalled although they print, unless their collectives change."""
    assert LONG_WAIT == 600
    for step in range(1000):
        node.collectives = (step + 1, step), (step, step)
        node.wait(19)
        node.clock.on_output(0)
    assert len(node.inspections) <= 1000 * 19 / (LONG_WAIT / 2)
    assert not node.sent
    began = node.now
    while not node.sent:
        node.wait(19)
        node.clock.on_output(0)
    assert LONG_WAIT / 2 <= node.now - began <= LONG_WAIT
    node.clock.observe(events.JobStalled(began, "no progress"))
    node.sent.clear()
    node.clock.on_output(0)
    assert not node.sent, "what it prints is no progress"
    node.collectives = (2000, 1999), (1999, 1999)
    for _ in range(3):
        node.wait(9)
        node.clock.on_output(0)
    assert node.sent == [(pytest.approx(node.now, abs=20), ProgressResumed(0))]


def test_silent_ranks_that_make_progress_are_inspected_once_in_five_minutes(node):
    """A rank that waits in a call other than a collective is reported."""
    node.collectives = (4, 4), (4, 4)
    node.wait(300)
    assert node.inspections == [1020, 1040, 1080, 1160, 1240]
    node.wait(3000)
    assert len(node.inspections) == 15
    assert not node.sent
    node.fields = {"inside": ActiveCall("recv", "recv", 1)}
    node.wait(600)
    assert node.sent


def test_at_most_one_inspection_in_20_seconds(node):
    """Output after each inspection does not make them more frequent."""
    node.collectives = (4, 4), (4, 4)
    for _ in range(100):
        node.wait(21)
        node.clock.on_output(0)
    assert len(node.inspections) <= 100


def test_node_0_watches_a_busy_rank_for_which_others_wait_for_a_minute(node):
    for _ in range(40):
        node.wait(10)
        node.cpu += 1.0
    assert [moment for moment, _ in node.sent] == [1084, 1164, 1300]


def test_a_busy_rank_or_a_collective_is_progress(node):
    for _ in range(7):
        node.wait(10)
        node.cpu += 1.0
    for step in range(6000):
        node.collectives = (step + 1, step), (step, step)
        node.wait(1.5)
    assert not node.sent
    node.wait(900)
    assert node.sent


@pytest.mark.parametrize(
    ("ran", "waited", "is_busy"),
    [
        (0.015, 0.5, True),
        (0.002, 0.99, True),
        (0.0, 0.99, False),
        (0.002, 0.6, False),
        (0.014, 0.0, False),
        (0.0175, 0.11, True),  # an evaluation of small batches
        (0.021, 0.0, True),
    ],
)
def test_a_rank_that_waits_for_a_cpu_is_busy_but_not_one_that_polls(node, ran, waited, is_busy):
    """On a machine with load even a busy rank uses little; in the second case, the rest of its time is all waiting."""
    node.shares = ran, waited
    node.wait(59)
    assert bool(node.sent) is not is_busy


def measure_busy(node: Node) -> float | None:
    """How many CPUs rank 1 has used since the last inspection of the detector."""
    found: list[Inspection] = []
    node.inspect(node.ranks, found.append)
    measured = node.clock.add_idle_times(found[0], node.ranks)  # type: ignore[arg-type]
    assert node.notes == []
    return measured.ranks[1].busy


@pytest.mark.parametrize(
    ("later", "busy"),
    [(5.0, 1.0), (1.0, 0.0), (1.0 - CPU_NOISE_S, 0.0), (1.0 - CPU_NOISE_S - 0.01, None)],
)
def test_a_process_with_less_cpu_time_than_before_is_another_one(node, later, busy):
    """How busy it was is unknown then; a difference of two ticks is rounding."""
    node.cpu = 1.0
    node.wait(24)
    node.cpu = later
    node.wait(4)
    assert measure_busy(node) == busy


def test_a_new_process_has_used_an_unknown_time(node):
    process = node.ranks.processes.pop(1)
    node.wait(24)
    node.ranks.processes[1] = process
    node.wait(4)
    assert measure_busy(node) is None


def test_a_delayed_inspection_is_discarded(node, monkeypatch):
    """The launcher and its ranks were suspended in between."""
    node.now += 3600
    node.wait(0)
    assert not node.inspections
    node.wait(22)
    monkeypatch.setattr(stall_detector.time, "time", lambda: node.now + 2e9)  # the wall clock is set
    node.wait(1)
    assert not node.sent
    node.wait(1)
    assert len(node.sent) == 1


def test_a_rank_waits_since_it_entered_its_last_collective_unless_the_clock_was_set(node, monkeypatch):
    node.fields = {"last": (Collective("0", 5, "all_reduce", "", 0.0, node.now + 1e9 - 100, False, True),)}
    node.wait(7)
    waits = list[float]()

    def add_idle_times(inspection: Inspection) -> None:
        first = node.clock.add_idle_times(inspection, node.ranks).ranks[0]
        waits.append(first.standstill)
        assert first.quiet == 7

    for ahead in (0.0, 0.9, 2.0):
        monkeypatch.setattr(stall_detector.time, "time", lambda ahead=ahead: node.now + 1e9 + ahead)
        node.inspect(node.ranks, add_idle_times)
    assert waits == [pytest.approx(107), pytest.approx(107.9), 0.0]


@pytest.mark.parametrize("noticed", [True, False])
def test_a_rank_that_ends_while_the_others_are_inspected_is_progress(monkeypatch, noticed):
    """It may have set the key for which another rank was seen to wait: both stacks are from before."""
    node = Node(monkeypatch, Hangs(stall_timeout=20.0))
    node.fields = {"threads": (Thread((Frame("validate", "t.py", 31, own=True),)),)}
    node.wait(19)
    seen: list[Inspection] = []
    node.inspect(node.ranks, seen.append)
    validating, waiting = seen[0].ranks
    ended = replace(validating, condition=ProcessCondition.EXITED, code=0 if noticed else None)
    waiting = replace(waiting, awaits="store")

    def is_stalled(first: RankInspection) -> bool:
        found = replace(seen[0], ranks=(first, waiting))
        return check_stall(node.clock.add_idle_times(found, node.ranks), 20.0, strict=True).stall is not None

    assert not is_stalled(ended), "19 seconds"
    if noticed:
        node.clock.observe(events.RankExited(0, 100, 0, 0))
        node.ranks.processes.pop(0)
    node.wait(19)
    assert not is_stalled(ended)
    node.clock.observe(events.RankExited(0, 100, 0, 0))
    node.ranks.processes.pop(0, None)
    node.wait(20)
    assert is_stalled(ended), "nothing has happened since"


def test_before_init_process_group_ranks_are_not_inspected(node):
    for channel in node.ranks.channels.values():
        channel.has_thread = False
    node.wait(3600)
    assert not node.inspections


def test_runtime_working_counts_as_output(node):
    """``runtime.working`` does not wake the launcher, which reads it when its timer expires."""
    for _ in range(100):
        node.wait(19)
        node.worked = node.now
    assert not node.sent
    node.wait(24)
    assert [moment for moment, _ in node.sent] == [node.now]


@pytest.mark.parametrize("how", ["prints", "enters a collective"])
def test_progress_after_a_stall_is_reported_once(node, how):
    """The next line of output is progress, or a change at the next inspection."""
    node.wait(50)
    node.clock.observe(events.JobStalled(1000.0, "no progress"))
    node.clock.reset()  # as after Ctrl-Z, which is no progress
    assert not [each for each in node.sent if isinstance(each[1], ProgressResumed)]
    if how == "prints":
        node.clock.on_output(1)
        node.clock.on_output(1)
    else:
        node.wait(25)
        node.collectives = (6, 5), (5, 5)
        node.wait(60)
    reported = [moment for moment, each in node.sent if each == ProgressResumed(0)]
    assert reported == ([1050] if how == "prints" else [1090])


@pytest.mark.parametrize("broken", ["_silence_s", "_add_measurements"])
def test_an_exception_in_the_detector_is_reported_once(node, monkeypatch, broken):
    def fail(*arguments):
        raise RuntimeError("the stall clock")

    monkeypatch.setattr(StallDetector, broken, fail)
    node.wait(3600)
    assert len(node.notes) == 1
    assert node.notes[0].startswith("bug in ddplaunch: stall detection failed")
    assert not node.sent


@pytest.mark.parametrize("called", ["begin", "restart", "printed", "noting", "complete"])
def test_an_exception_in_the_detector_does_not_reach_its_callers(node, monkeypatch, called):
    def fail(*arguments):
        raise RuntimeError("the stall clock")

    for name in ("_on_rank_activity", "_time_since_progress"):
        monkeypatch.setattr(StallDetector, name, fail)
    inspections: list[Inspection] = []
    node.inspect(node.ranks, inspections.append)
    clock, inspection = node.clock, inspections[0]
    callers: dict[str, Callable[[], object]] = {
        "begin": lambda: clock.start_attempt(node.ranks),
        "restart": clock.reset,
        "printed": lambda: clock.on_output(0),
        "noting": lambda: clock.wrap_inspection_callback(node.ranks, inspections.append)(inspection),
        "complete": lambda: inspections.append(clock.add_idle_times(inspection, node.ranks)),
    }
    callers[called]()
    assert inspections[1:] == ([inspection] if called in ("noting", "complete") else []), "the inspection is passed on"
    assert len(node.notes) == 1
    assert "stall detection failed" in node.notes[0]
