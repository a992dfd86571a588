"""What others than the machine may know of an attempt."""

from __future__ import annotations

import pytest

from ddplaunch.core.node.node_attempt import AttemptPhase
from tests.core.machine_histories import step
from tests.core.node.machine_world import World, exited, spawned, start, started, stop


def test_a_view_of_an_attempt_follows_it_and_cannot_change_it():
    world = World()
    world.replay((step(0, start()), step(1, started(), "spawn 0", "spawn 1")))
    view = world.machine.view
    assert (view.number, view.phase, view.not_spawned, view.failures) == (0, AttemptPhase.RUNNING, 2, ())
    world.replay((step(1, spawned(0), "send RanksStarted"), step(1, spawned(1))))
    world.replay(
        (step(5, exited(1, 3), "send failure of 1: 3"), step(5, stop(), "SIGTERM to all, but those that fail"))
    )
    assert (view.phase, view.not_spawned) == (AttemptPhase.STOPPING, 0)
    assert [failure.rank for failure in view.failures] == [1]
    assert [view.is_stop_requested(rank) for rank in (0, 1, 2)] == [True, False, False]
    with pytest.raises(AttributeError):
        view.phase = AttemptPhase.ENDED
