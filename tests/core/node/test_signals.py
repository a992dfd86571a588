"""Tests that a signal which comes to several nodes at once reaches each rank once."""

from __future__ import annotations

import signal

import pytest

from ddplaunch.core.job.signal_deduplicator import SignalDeduplicator
from ddplaunch.core.node.signals import BroadcastSignalFilter
from ddplaunch.core.signals import DUPLICATE_WINDOW_S

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


@pytest.mark.parametrize(
    ("came", "passed_on"),
    [
        ([(0, USR1, 0.0), (1, USR1, 0.1), (2, USR1, 0.2)], 1),  # from a scheduler, to all
        ([(1, USR1, 0.0), (1, USR1, 0.1)], 2),  # to one node, twice
        ([(0, USR1, 0.0), (0, USR1, 0.1), (1, USR1, 0.2), (1, USR1, 0.3)], 2),  # to all, twice
        ([(0, USR1, 0.0), (1, USR1, 0.1), (1, USR1, 0.2)], 2),  # to all, then to one
        ([(0, USR1, 0.0), (1, USR2, 0.1)], 2),  # another one
        ([(1, USR1, 0.0), (0, USR1, DUPLICATE_WINDOW_S + 0.1)], 2),  # another one, later
    ],
)
def test_a_signal_on_several_nodes_is_forwarded_once(came, passed_on):
    relay = SignalDeduplicator()
    taken = [relay.should_forward(node, number, 100 + moment) for node, number, moment in came]
    assert taken.count(True) == passed_on


def test_a_signal_that_the_ranks_got_is_not_forwarded():
    direct = BroadcastSignalFilter()
    direct.record(USR1, 100.0)
    assert direct.was_seen(USR1, 100.1)
    assert [direct.consume(number, 100.1) for number in (USR2, USR1, USR1)] == [False, True, False]
    direct.record(USR1, 100.0)
    assert not direct.consume(USR1, 100 + 10 * DUPLICATE_WINDOW_S)
