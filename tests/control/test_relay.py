"""A signal that comes to several nodes at once is one signal for their ranks."""

from __future__ import annotations

import signal

import pytest

from ddplaunch.control.relay import TOGETHER, Relay

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


@pytest.mark.parametrize(
    ("came", "passed_on"),
    [
        ([(0, USR1, 0.0), (1, USR1, 0.1), (2, USR1, 0.2)], 1),  # from a scheduler, to all
        ([(1, USR1, 0.0), (1, USR1, 0.1)], 2),  # to one node, twice
        ([(0, USR1, 0.0), (0, USR1, 0.1), (1, USR1, 0.2), (1, USR1, 0.3)], 2),  # to all, twice
        ([(0, USR1, 0.0), (1, USR2, 0.1)], 2),  # another one
        ([(1, USR1, 0.0), (0, USR1, TOGETHER + 0.1)], 2),  # somebody's, later
    ],
)
def test_each_is_passed_on_once(came, passed_on):
    now = 0.0
    relay = Relay(lambda: now)
    taken = []
    for node, number, now in came:  # noqa: B007
        taken.append(relay.take(node, number))
    assert taken.count(True) == passed_on
