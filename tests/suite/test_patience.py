"""Tests that timeouts grow with the slowness of the machine, measured each minute, and with its load."""

import os

import pytest

from tests import patience


@pytest.fixture
def clock(monkeypatch):
    """A probe that takes as many seconds as ``clock["work"]`` says, at ``clock["now"]``."""
    times = {"now": 1000.0, "work": patience.QUIET}

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return times["now"]

        @staticmethod
        def thread_time() -> float:
            times["now"] += times["work"] / 2  # once before the work, once behind it
            return times["now"]

    monkeypatch.setattr(patience, "time", Clock)
    monkeypatch.setattr(patience, "_probed_at", float("-inf"))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.0, 0.0))
    return times


def test_it_grows_with_a_probe_of_every_minute(clock):
    clock["work"] = 6 * patience.QUIET
    assert patience.scaled_timeout(10) == pytest.approx(30)
    clock["work"] = 2 * patience.QUIET
    assert patience.scaled_timeout(10) == pytest.approx(30), "the probe is fresh"
    clock["now"] += 61
    assert patience.scaled_timeout(10) == pytest.approx(10)


def test_a_quick_machine_gets_no_less(clock):
    clock["work"] = patience.QUIET / 100
    assert patience.scaled_timeout(10) == 10


def test_it_grows_with_how_many_share_a_core(clock, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (8.0, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert patience.scaled_timeout(10) == pytest.approx(40)
    assert patience.machine_slowness() == 1
