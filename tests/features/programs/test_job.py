"""Histories of the programs' part on node 0, without processes."""

import signal
import time
from random import Random

import pytest

from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.options import Options
from ddplaunch.core import messages
from ddplaunch.core.deadlines import Now
from ddplaunch.core.job import commands as do
from ddplaunch.core.job import job_events as ev
from ddplaunch.core.job.job_attempt import JobPhase
from ddplaunch.features.programs.feature import FEATURE
from ddplaunch.features.programs.job import STOP_MARGIN_S
from ddplaunch.features.programs.messages import (
    HeldAddress,
    MainDone,
    MainEnded,
    PortsHeld,
    ProgramFailed,
    ProgramIsReady,
    StartPrograms,
    StopMains,
)
from ddplaunch.features.programs.options import ProgramOptions
from ddplaunch.features.programs.spec import ProgramSpec, encode_program
from ddplaunch.system.processes.proc_utils import KILL_TIMEOUT_S
from tests.core.job.job_world import World, joins, lost, reported

VLLM = encode_program(ProgramSpec("vllm", ("vllm",))).partition("=")[2]
ADDRESS = HeldAddress("vllm", "", "n0", 8000)
FAILED = (0, ProgramFailed(0, 7, "vllm exited with code 7", ("out of memory",)))
CAUSE = "vllm exited with code 7 (exit code 7)\n  its last lines:\n  | out of memory"


@pytest.fixture
def world():
    """A job of two nodes, which have joined."""
    options = Options({ProgramOptions: ProgramOptions(program=(VLLM,))}, {})
    found = World(features=(("programs", FEATURE),), min_nodes=2, options=options)
    found.at(0, joins(1), "0: status: 1/2 nodes joined, waiting for node 1", "1: accept", "all: HoldPorts")
    return found


def begin(world):
    world.at(1, (0, PortsHeld(0, (ADDRESS,))), "all: StartPrograms")
    world.at(5, (0, ProgramIsReady(0, "vllm")), "all: ReadyPrograms")
    world.at(5, (0, messages.CheckPassed(0)))
    world.at(5, (1, messages.CheckPassed(0)), "all: start attempt 0")


def test_all_nodes_get_the_addresses_and_start_when_the_service_is_ready(world):
    world.at(0.5, (1, PortsHeld(0, ())))
    begin(world)
    world.at(9, (0, messages.RanksFinished(0)))
    world.at(9, (1, messages.RanksFinished(0)))
    world.at(9, reported(0))
    world.at(9, reported(1), "all: end, 0")


def test_a_node_that_replies_late_gets_what_the_others_have(world):
    world.at(1, (0, PortsHeld(0, (ADDRESS,))), "all: StartPrograms")
    world.at(2, (0, ProgramIsReady(0, "vllm")), "all: ReadyPrograms")
    world.at(3, (1, PortsHeld(0, ())), "1: StartPrograms", "1: ReadyPrograms")


def test_a_failure_before_the_start(world):
    world.at(1, FAILED, f"all: end, 7: {CAUSE}")


def test_a_failure_while_ranks_run(world):
    begin(world)
    world.at(9, (0, messages.RanksFinished(0)))
    note = "all: note: vllm exited with code 7: stopping the ranks"
    world.at(9, FAILED, note, "all: stop, SIGTERM, 30 s")
    world.at(9.1, reported(0))
    world.at(9.2, reported(1), f"all: end, 7: {CAUSE}")


def test_a_service_may_end_once_all_ranks_are_done(world):
    begin(world)
    world.at(9, (0, messages.RanksFinished(0)))
    world.at(9, (1, messages.RanksFinished(0)))
    world.at(9, FAILED)
    world.at(9, reported(0))
    world.at(9, reported(1), "all: end, 0")


def test_what_belongs_to_another_attempt_has_no_effect(world):
    begin(world)
    for message in (ProgramFailed(1, 7, "x"), ProgramIsReady(3, "x"), PortsHeld(2, ()), MainDone(7, "x")):
        world.at(9, (0, message))


INFER = [ProgramSpec("infer", ("infer",), nodes=2), ProgramSpec("orch", ("orch",), "main", nodes=1)]


@pytest.fixture
def wide():
    """A job with ranks on node 0, a service on nodes 1 and 2, and a main on node 3."""
    texts = tuple(encode_program(each).partition("=")[2] for each in INFER)
    options = Options({ProgramOptions: ProgramOptions(program=texts)}, {})
    found = World(features=(("programs", FEATURE),), min_nodes=4, without_ranks=3, options=options)
    for number in (1, 2):
        found.play(0, joins(number))
    found.at(0, joins(3), "3: accept", "all: HoldPorts")
    return found


def held(node, *names):
    return node, PortsHeld(0, tuple(HeldAddress(name, "", f"n{node}", 8000) for name in names))


def begin_wide(world):
    world.at(1, held(2, "infer.1"))
    world.at(1, held(1, "infer.0"))
    world.at(1, held(0))
    world.at(1, held(3, "orch"), "all: StartPrograms")
    for node, name in ((1, "infer.0"), (2, "infer.1"), (3, "orch")):
        world.at(5, (node, ProgramIsReady(0, name)), "all: ReadyPrograms")
    for node in range(3):
        world.at(5, (node, messages.CheckPassed(0)))
    world.at(5, (3, messages.CheckPassed(0)), "0: start attempt 0")


def test_programs_start_when_the_addresses_of_all_nodes_are_known(wide):
    begin_wide(wide)
    wide.at(9, (0, messages.RanksFinished(0)))
    wide.at(9, reported(0))
    wide.at(10, (3, MainDone(0, "orch")), "all: end, 0")


def test_a_lost_node_with_a_service_ends_the_job(wide):
    begin_wide(wide)
    text = "node 2 (n2) was lost: end of file"
    wide.at(9, lost(2, "end of file"), f"all: note: {text}: stopping the ranks", "all: stop, SIGTERM, 30 s")
    wide.at(9.1, reported(0), "all: StopMains")
    wide.at(9.2, (3, MainEnded(0, "orch")), f"all: end, 69: {text} (exit code 69)")


def test_services_live_until_a_main_on_another_node_has_ended(wide):
    begin_wide(wide)
    note = "Ctrl-C on node 0 (n0)"
    wide.at(9, (0, messages.StopRequested(signal.SIGINT)), f"1, 2, 3: note: {note}", "all: stop, SIGINT, 30 s")
    wide.at(10, reported(0), "all: StopMains")
    wide.at(35, (3, MainEnded(0, "orch")), "all: end, 130")


def test_a_main_on_another_node_that_does_not_end_is_awaited_for_its_grace(wide):
    begin_wide(wide)
    wide.play(9, (0, messages.StopRequested(signal.SIGINT)))
    wide.at(10, reported(0), "all: StopMains")
    wide.at(10 + 30 + KILL_TIMEOUT_S + STOP_MARGIN_S, None, "all: end, 130")


def test_a_second_stop_awaits_no_main(wide):
    begin_wide(wide)
    wide.play(9, (0, messages.StopRequested(signal.SIGINT)))
    wide.at(10, reported(0), "all: StopMains")
    wide.play(11, (0, messages.StopRequested(signal.SIGINT, again=True)))
    assert wide.machine.phase is JobPhase.ENDED


def test_a_main_that_is_lost_during_the_stop_is_not_awaited(wide):
    begin_wide(wide)
    wide.play(9, (0, messages.StopRequested(signal.SIGINT)))
    wide.at(10, reported(0), "all: StopMains")
    wide.play(11, lost(3, "end of file"))
    assert wide.machine.phase is JobPhase.ENDED


def test_a_node_that_is_lost_while_its_programs_are_awaited(wide):
    wide.at(1, held(2, "infer.1"))
    wide.at(2, lost(2, "end of file"), "all: end, 69: node 2 (n2) was lost: end of file")


def test_a_node_that_is_lost_when_only_a_main_is_left(wide):
    begin_wide(wide)
    wide.at(9, (0, messages.RanksFinished(0)))
    wide.at(9, reported(0))
    text = "node 1 (n1) was lost: end of file"
    notes = (f"all: note: {text}: stopping the ranks", "2, 3: stop, SIGTERM, 30 s")
    wide.at(10, lost(1, "end of file"), *notes, "all: StopMains")
    wide.at(11, (3, MainEnded(0, "orch")), f"all: end, 69: {text} (exit code 69)")


def test_a_node_must_not_answer_for_the_programs_of_another(wide):
    for message in (held(1, "infer.1")[1], ProgramIsReady(0, "orch"), MainDone(0, "orch")):
        with pytest.raises(ProtocolError, match="a program of another node"):
            wide.machine.on(ev.MessageReceived(1, message), Now(1, 1))


# ------------------------------------------------------------------------------------------------- random histories

OWNERS = {"infer.0": 1, "infer.1": 2, "orch": 3}


class RandomNodes:
    """Four nodes that send at random what they may send; it checks what node 0 orders."""

    def __init__(self, seed):
        self.random = Random(seed)
        texts = tuple(encode_program(each).partition("=")[2] for each in INFER)
        options = Options({ProgramOptions: ProgramOptions(program=texts)}, {})
        self.world = World(features=(("programs", FEATURE),), min_nodes=4, without_ranks=3, options=options)
        self.code, self.failed = None, False
        self.there, self.held, self.started, self.passed = {0}, set(), set(), set()
        self.running = self.ranks_done = self.main_done = self.reported = self.stopping = False
        for number in (1, 2, 3):
            self.do(joins(number)(self.world))
            self.there.add(number)

    def do(self, event):
        self.world.now += self.random.choice((0, 0.1, 2))
        for command in self.world.on(event):
            if isinstance(command, do.Send):
                self.check(command.node_rank, command.message)

    def check(self, node, message):
        match message:
            case StartPrograms():
                assert {*range(4)} <= self.held, "before all addresses are known"
                assert node not in self.started, "twice"
                assert len(message.addresses) == 4
                self.started.add(node)
            case messages.StartAttempt():
                assert node == 0, "ranks on a node that has none"
                assert {*range(4)} <= self.passed, "before the gate is open"
                self.running = True
            case StopMains():
                self.stopping = True
            case messages.EndJob(outcome=outcome):
                assert not (self.stopping and self.main_runs), "services end before a main"
                assert self.code in (None, outcome.code)
                self.code = outcome.code

    def send(self, node, message):
        self.do(ev.MessageReceived(node, message))

    def hold(self, node):
        self.held.add(node)
        names = [name for name, owner in OWNERS.items() if owner == node] or ["train.py"]
        self.send(node, PortsHeld(0, tuple(HeldAddress(name, "", f"n{node}", 8000) for name in names)))

    def lose(self, node):
        self.there.discard(node)
        self.failed |= not (self.ranks_done and self.main_done)
        self.do(lost(node))

    def fail(self, node):
        self.failed |= not (self.ranks_done and self.main_done)
        self.send(node, ProgramFailed(0, 7, "it exited with code 7"))

    def step(self):
        choices = [(0.03, lambda: self.lose(self.random.choice((*self.there - {0},) or (9,))))]
        choices.append((0.03, lambda: self.fail(self.random.choice((*self.there,)))))
        for node in self.there - self.held:
            choices.append((1, lambda node=node: self.hold(node)))
        for name, node in OWNERS.items():
            if node in self.started & self.there:
                choices.append((0.3, lambda name=name, node=node: self.send(node, ProgramIsReady(0, name))))
        for node in (self.started & self.there) - self.passed:
            choices.append((0.5, lambda node=node: self.let_pass(node)))
        if self.running and not (self.ranks_done or self.reported):
            choices.append((0.5, self.finish_ranks))
        if self.main_runs:
            choices.append((0.3, self.end_main if self.stopping else self.finish_main))
        if self.running and not self.reported:
            choices.append((0.3 if self.ranks_done else 0.05 * self.failed, self.report))
        weights, actions = zip(*choices, strict=True)
        self.random.choices(actions, weights)[0]()

    @property
    def main_runs(self):
        return 3 in self.started & self.there and not self.main_done

    def end_main(self):
        self.main_done = True
        self.send(3, MainEnded(0, "orch"))

    def let_pass(self, node):
        self.passed.add(node)
        self.send(node, messages.CheckPassed(0))

    def finish_ranks(self):
        self.ranks_done = True
        self.send(0, messages.RanksFinished(0))

    def finish_main(self):
        self.main_done = True
        self.send(3, MainDone(0, "orch"))

    def report(self):
        self.reported = True
        self.do(reported(0)(self.world))

    def run(self):
        for _ in range(400):
            if self.code is not None:
                break
            self.step()
        assert self.code is not None, "it has not ended"
        assert bool(self.code) is self.failed, (self.code, self.failed)


def test_random_histories_of_four_nodes():
    first = int(time.time()) % 1_000_000
    for seed in range(first, first + 500):
        try:
            RandomNodes(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
