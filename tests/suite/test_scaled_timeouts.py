"""Tests that timeouts grow with the slowness of the machine, measured each minute, and with its load."""

import os

import pytest

from tests import scaled_timeouts


@pytest.fixture
def clock(monkeypatch):
    """A probe that takes as many seconds as ``clock["work"]`` says, at ``clock["now"]``."""
    times = {"now": 1000.0, "work": scaled_timeouts.QUIET}

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return times["now"]

        @staticmethod
        def thread_time() -> float:
            times["now"] += times["work"] / 2  # once before the work, once behind it
            return times["now"]

    monkeypatch.setattr(scaled_timeouts, "time", Clock)
    monkeypatch.setattr(scaled_timeouts, "_probed_at", float("-inf"))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.0, 0.0))
    return times


def test_it_grows_with_a_probe_of_every_minute(clock):
    clock["work"] = 6 * scaled_timeouts.QUIET
    assert scaled_timeouts.scaled_timeout(10) == pytest.approx(30)
    clock["work"] = 2 * scaled_timeouts.QUIET
    assert scaled_timeouts.scaled_timeout(10) == pytest.approx(30), "the probe is fresh"
    clock["now"] += 61
    assert scaled_timeouts.scaled_timeout(10) == pytest.approx(10)


def test_a_quick_machine_gets_no_less(clock):
    clock["work"] = scaled_timeouts.QUIET / 100
    assert scaled_timeouts.scaled_timeout(10) == 10


def test_it_grows_with_how_many_share_a_core(clock, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (8.0, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert scaled_timeouts.scaled_timeout(10) == pytest.approx(40)
    assert scaled_timeouts.machine_slowness() == 1
