"""Histories of a job with other programs beside its ranks: what their side may ask of the job, without any process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from ddplaunch.core import messages
from ddplaunch.core.deadlines import Now
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.feature import Feature, JobContext, JobSide
from ddplaunch.core.job import commands as do
from ddplaunch.core.job import job_events as ev
from ddplaunch.core.job.job_attempt import StopCause
from ddplaunch.core.messages import CheckRequest, FeatureMessage
from tests.core.job.job_world import World, failed, joins, reported, signalled
from tests.core.machine_histories import WALL


class Prepare(CheckRequest, frozen=True):
    """What a side sends before an attempt."""


class Happened(FeatureMessage, frozen=True):
    """Something has happened on a node."""


class Side(Feature, JobSide):
    """A feature with programs: ``then`` is called with the next message of a node."""

    def __init__(self) -> None:
        self.holds = False
        self.then: Callable[[], object] = lambda: None

    def make_job_side(self, context: JobContext) -> JobSide:
        self.context = context
        return self

    def before_start(self, attempt: int) -> Prepare:
        return Prepare(attempt, None)

    def on_message(self, node: int, message: Any) -> None:
        if isinstance(message, Happened):
            self.then()

    def holds_end(self) -> bool:
        return self.holds

    def may_explain(self, failure: RankFailure) -> bool:
        return failure.message == "refused"

    def fail(self, code: int = 7) -> None:
        self.context.stop_attempt(StopCause("vllm is gone", None, code=code, of_program=True, details="  | why"))


STATUS = "0: status: 1/2 nodes joined, waiting for node 1"
HAPPENED = (0, Happened())
PASSED = (0, messages.CheckPassed(0))


def started(*, holds: bool = False, **rules: object) -> tuple[World, Side]:
    """A job whose ranks run beside other programs."""
    side = Side()
    world = World(features=(("programs", side),), **rules)
    side.holds, side.then = holds, side.fail
    world.at(0, PASSED, "0: start attempt 0")
    return world, side


def test_requests_before_an_attempt_follow_one_another() -> None:
    first, second = Side(), Side()
    world = World(features=(("first", first), ("second", second)), min_nodes=2)
    world.at(0, joins(1), STATUS, "1: accept", "all: Prepare")
    world.at(1, (1, messages.CheckPassed(0)))
    world.at(2, PASSED, "all: Prepare")
    world.at(3, PASSED)
    assert world.machine.wake_at() is None, "a program may take any time to be ready"
    world.at(900, (1, messages.CheckPassed(0)), "all: start attempt 0")


def test_a_program_that_fails_before_the_ranks_start_ends_the_job() -> None:
    side = Side()
    world = World(features=(("programs", side),), max_restarts=3)
    side.then = side.fail
    world.at(5, HAPPENED, "0: end, 7: vllm is gone (exit code 7)\n  | why")


def test_a_program_that_fails_stops_the_ranks_and_is_the_cause() -> None:
    world, _ = started()
    world.at(9, HAPPENED, "0: note: vllm is gone: stopping the ranks", "0: stop, SIGTERM, 30 s")
    world.at(9.1, failed(0, 1, ago=0.05))
    world.at(9.2, reported(0), "0: end, 7: vllm is gone (exit code 7)\n  | why\n  meanwhile: rank 1 exited with code 1")


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_lost_its_server_waits_for_the_end_of_that(is_late: bool) -> None:
    """Also where all ranks have ended by then; five seconds later it counts as the cause itself."""
    world, _ = started()
    world.at(9, failed(0, 0, message="refused"))
    world.at(9.1, failed(0, 1, message="refused"))
    world.at(9.2, reported(0))
    if is_late:
        world.at(14, None, "0: end, 1, rank 0 failed, 0 stopped")
    else:
        text = "vllm is gone (exit code 7)\n  | why\n  meanwhile: rank 0 failed with refused (exit code 1)"
        world.at(13.9, HAPPENED, "0: note: vllm is gone: stopping the ranks", f"0: end, 7: {text}")


def test_a_rank_that_has_failed_before_is_the_cause() -> None:
    world, _ = started()
    world.at(9, failed(0, 0, exit_code=5), "0: stop, SIGTERM, 30 s")
    world.at(9.1, HAPPENED)
    world.at(9.2, reported(0), "0: end, 5, rank 0 failed, 0 stopped")


def test_the_job_lasts_until_a_main_program_is_done() -> None:
    world, side = started(holds=True)
    world.at(9, (0, messages.RanksFinished(0)))
    world.at(9.1, reported(0))
    assert world.machine.wake_at() is None
    side.holds, side.then = False, side.context.allow_end
    world.at(100, HAPPENED, "0: end, 0")


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (signalled(0, signal.SIGINT), ("0: end, 130",)),
        (HAPPENED, ("0: note: vllm is gone: stopping the ranks", None)),
    ],
)
def test_what_ends_a_job_of_which_only_a_main_program_is_left(event: Any, expected: tuple[Any, ...]) -> None:
    world, _ = started(holds=True)
    world.at(9, (0, messages.RanksFinished(0)))
    world.at(9.1, reported(0))
    end = "0: end, 7: vllm is gone (exit code 7)\n  | why"
    world.at(20, event, *(each or end for each in expected))


def test_the_timeout_ends_a_job_of_which_only_a_main_program_is_left() -> None:
    world, _ = started(holds=True, timeout=60.0)
    world.at(9, (0, messages.RanksFinished(0)))
    world.at(9.1, reported(0))
    note = "0: note: --timeout (1m00s) expired: stopping the ranks"
    world.at(60, None, note, "0: end, 124: --timeout (1m00s) expired")


def test_a_failed_program_uses_a_restart_and_its_end_meanwhile_none() -> None:
    world, side = started(max_restarts=1, restart_backoff=5.0)
    world.at(9, HAPPENED, "0: note: vllm is gone: stopping the ranks", "0: stop, SIGTERM, 30 s")
    world.at(9.5, reported(0), "0: restart: vllm is gone; restart 1 of 1 in 5 s")
    world.at(12, HAPPENED)
    world.at(14.5, None, "0: Prepare")
    side.then = lambda: side.fail(9)
    world.at(16, (0, messages.CheckPassed(1)), "0: start attempt 1")
    world.at(20, HAPPENED, "0: note: vllm is gone: stopping the ranks", "0: stop, SIGTERM, 30 s")
    used = "no restarts left (--max-restarts 1)"
    world.at(20.5, reported(0, 1), f"0: end, 9: vllm is gone (exit code 9)\n  | why\n{used}")


def test_a_side_that_raises_holds_the_job_no_longer() -> None:
    world, side = started(holds=True)
    world.at(9, (0, messages.RanksFinished(0)))
    world.at(9.1, reported(0))
    side.then = lambda: 1 / 0
    commands = world.machine.on(ev.MessageReceived(*HAPPENED), Now(10.0, WALL))
    assert isinstance(commands[-1], do.Send)
    assert isinstance(commands[-1].message, messages.EndJob)
    assert commands[-1].message.outcome.code == 0
