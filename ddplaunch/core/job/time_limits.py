"""The time limit of the whole job, --timeout; and the pause of all time limits while a rank waits for a user."""

from __future__ import annotations

from ddplaunch.base.text import format_elapsed
from ddplaunch.core.deadlines import Deadline, Deadlines, Now
from ddplaunch.core.job.job_attempt import StopCause
from ddplaunch.core.job.job_deadlines import JobTimeoutOver
from ddplaunch.core.job.node_table import NodeTable
from ddplaunch.core.machine import Command
from ddplaunch.core.messages import HoldChanged, JobStalled, Message, ProgressResumed, RanksStarted
from ddplaunch.core.options import TimeLimit


class TimeLimits:
    """The time limits of one job, and whether the nodes were told of a stall. Features add limits of their own."""

    def __init__(self, nodes: NodeTable, deadlines: Deadlines[Deadline]) -> None:
        self._nodes, self._deadlines = nodes, deadlines
        self.timeout_expired = False  # whether --timeout has expired
        self.is_stalled = False  # whether the nodes were sent JobStalled, and no ProgressResumed since
        self._attempt = -1
        self._ranks_started = False  # whether a rank has started: --timeout counts from then
        self._timeout_s = self._remaining_s = nodes.config.options[TimeLimit].timeout
        self._set_at = 0.0  # ``_remaining_s`` counts from then
        self._holding: set[int] = set()  # nodes with a rank that waits for a user

    @property
    def are_paused(self) -> bool:
        """Whether no time limit counts now: a rank waits for a user."""
        return bool(self._holding)

    def begin(self, attempt: int, now: Now) -> list[Command]:
        """Called when an attempt starts: reset what belongs to the previous one."""
        if self._attempt < 0:
            self._set_timeout(now)  # also where no rank ever starts
        self._attempt = attempt
        return self.end(now)

    def end(self, now: Now) -> list[Command]:
        """Called when an attempt or the job ends: no rank waits for a user any more."""
        self.is_stalled = False
        commands: list[Command] = []
        for node in list(self._holding):
            commands += self.on_hold_changed(node, now, is_holding=False)
        return commands

    def on_message(self, node: int, message: Message, now: Now) -> list[Command]:
        """Handle a node's message about its ranks in this attempt."""
        match message:
            case RanksStarted() if not self._ranks_started:  # --timeout counts from the first one
                self._ranks_started = True
                self._remaining_s = self._timeout_s
                self._set_timeout(now)
            case ProgressResumed() if self.is_stalled and not self._holding:
                self.is_stalled = False
                return self._nodes.to_all(ProgressResumed(self._attempt))
            case HoldChanged(is_holding=is_holding):
                return self.on_hold_changed(node, now, is_holding=is_holding)
        return []

    def _set_timeout(self, now: Now) -> None:
        if self._remaining_s is not None and not self.timeout_expired and not self._holding:
            self._set_at = now.mono
            self._deadlines.set(JobTimeoutOver(), now.mono + self._remaining_s)

    def on_hold_changed(self, node: int, now: Now, *, is_holding: bool) -> list[Command]:
        """Called when a rank of this node waits for a user, or none does any more: pause or resume time limits."""
        before = bool(self._holding)
        (self._holding.add if is_holding else self._holding.discard)(node)
        if before == bool(self._holding):
            return []
        if not self._holding:
            self.is_stalled = False
            self._set_timeout(now)
            return self._nodes.to_all(ProgressResumed(self._attempt))
        if self._remaining_s is not None and JobTimeoutOver() in self._deadlines:
            self._deadlines.cancel(JobTimeoutOver())
            self._remaining_s = max(0.0, self._remaining_s - (now.mono - self._set_at))
        return self._nodes.to_all(JobStalled(now.wall, ""))

    def on_timeout(self) -> StopCause:
        """Handle ``JobTimeoutOver``: return the cause that stops the job."""
        self.timeout_expired = True
        return StopCause(f"--timeout ({format_elapsed(self._timeout_s or 0)}) expired", None)

    def on_stall(self, since: float, text: str) -> list[Command]:
        """Announce to all nodes that the job makes no progress; ``text`` is the note to print, or ""."""
        self.is_stalled = True
        return self._nodes.to_all(JobStalled(since, text))
