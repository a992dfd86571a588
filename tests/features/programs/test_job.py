"""Histories of the programs' part on node 0, without processes."""

import pytest

from ddplaunch.base.options import Options
from ddplaunch.core import messages
from ddplaunch.features.programs.feature import FEATURE
from ddplaunch.features.programs.messages import (
    HeldAddress,
    MainsDone,
    PortsHeld,
    ProgramFailed,
    ProgramIsReady,
)
from ddplaunch.features.programs.options import ProgramOptions
from ddplaunch.features.programs.spec import ProgramSpec, encode_program
from tests.core.job.job_world import World, joins, reported

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
    world.at(1, (0, MainsDone(0)))
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
    for message in (ProgramFailed(1, 7, "x"), ProgramIsReady(3, "x"), PortsHeld(2, ()), MainsDone(7)):
        world.at(9, (0, message))
