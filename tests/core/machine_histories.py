"""Histories of a machine in a simulated world, which the worlds of each kind of machine share: a clock, and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct

from ddplaunch.core.deadlines import Now
from ddplaunch.core.machine import Command, DeadlineDue, MachineEvent

WALL = 1e9
"""Seconds since the epoch when the simulated clock is at 0."""


class MachineWorld:
    """What is around a machine. ``now`` is the monotonic clock, in seconds; a subclass makes ``machine``."""

    machine: Any
    now = 0.0

    def on(self, event: MachineEvent) -> list[Any]:
        """Let an event happen now; return the commands."""
        found: list[Command] = self.machine.on(event, Now(self.now, WALL + self.now))
        return found

    def wait_until(self, moment: float) -> list[Any]:
        """Let time pass; return the commands of the deadlines that come."""
        done: list[Command] = []
        due = 0
        while (wake_at := self.machine.wake_at()) is not None and wake_at <= moment:
            self.now, due = max(self.now, wake_at), due + 1
            assert due < 1000, "a deadline that is due stays armed"
            done += self.on(DeadlineDue())
        self.now = max(self.now, moment)
        return done

    def describe_all(self, commands: Sequence[Any]) -> list[str]:
        """Return the commands in a few words, without those that a history leaves out."""
        raise NotImplementedError

    def play(self, seconds: float, event: Any) -> list[str]:
        """Let time pass, then something happen (None: nothing); return the commands in a few words.

        A function makes the event of this world at this moment.
        """
        found = self.describe_all(self.wait_until(seconds))
        if event is not None:
            found += self.describe_all(self.on(event(self) if callable(event) else event))
        return found

    def replay(self, history: Iterable[Step]) -> None:
        """Replay a history; assert the commands of each step."""
        for each in history:
            found = self.play(each.at, each.event)
            assert found == list(each.expected), f"at {each.at:g} s: {found}"


def describe_by(describe: Callable[[Any], str | None], commands: Sequence[Any]) -> list[str]:
    """Describe each command; None leaves one out."""
    return [text for command in commands if (text := describe(command)) is not None]


class Step(Struct, frozen=True):
    """What happens at a moment (None: nothing; time passes), and the commands expected until then and from it."""

    at: float
    event: Any
    expected: tuple[str, ...]


def step(at: float, event: Any, *expected: str) -> Step:
    return Step(at, event, expected)
