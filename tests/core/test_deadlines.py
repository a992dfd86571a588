"""Deadlines: set, moved, cancelled, and asked for."""

from __future__ import annotations

from ddplaunch.core.deadlines import Deadlines


def test_deadlines_are_due_once_the_earliest_first_and_can_be_moved_and_cancelled() -> None:
    deadlines = Deadlines()
    assert deadlines.next is None
    assert deadlines.pop_due(9.0) is None
    for name, at in (("late", 3.0), ("early", 1.0), ("moved", 1.0), ("cancelled", 1.5)):
        deadlines.set(name, at)
    deadlines.set("moved", 2.0)
    deadlines.cancel("cancelled", "unknown")
    assert deadlines.next == 1.0
    assert deadlines.pop_due(0.5) is None
    assert [deadlines.pop_due(2.0), deadlines.pop_due(2.0)] == ["early", "moved"]
    assert deadlines.pop_due(2.0) is None
    assert "late" in deadlines
    deadlines.cancel()
    assert deadlines.next is None
