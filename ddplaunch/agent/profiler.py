"""Takes a profile of this node's ranks: sends them ticks for some seconds, and reads what each then tells.

A tick is a signal that the rank has begun to catch when a profile was asked of it (``rank/sampler.py``). It goes only
to a process that catches it, as the kernel says right before: an exec clears that, and it would kill.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from ddplaunch.agent.ranks import NOT_BEGUN, RankProcess, Ranks
from ddplaunch.agent.signals import has, signal_sets
from ddplaunch.agent.stack_dump import TAKEN
from ddplaunch.control.messages import TakeProfile
from ddplaunch.dataclass import replace
from ddplaunch.diagnosis.profile import PERIOD, STARTING, RankProfile, most_places, read_profile
from ddplaunch.files import read_regular
from ddplaunch.loop import Loop

PATIENCE = 5.0  # seconds after the last tick for ranks to tell, who may hold the GIL
_LEAD = 0.1  # seconds for ranks to prepare
_LOOK = 0.02  # seconds between two looks for what they tell
_MAX = 64 << 20  # bytes of that


class Profiler:
    """One profile, from ``begin`` until ``done`` is called."""

    def __init__(
        self,
        loop: Loop,
        ranks: Ranks,
        order: TakeProfile,
        hear: Callable[[RankProfile], None],
        done: Callable[[], None],
    ) -> None:
        """``hear`` gets the profile of each rank."""
        self._loop, self._ranks, self._order, self._hear, self._done = loop, ranks, order, hear, done
        self._ticks = max(1, round(order.seconds / PERIOD))
        self._asked: dict[int, _Asked] = {}  # the ranks that are still to tell

    def begin(self) -> None:
        self._began = time.monotonic() + _LEAD
        for rank in self._ranks.plan.local_ranks:
            why_not = self._ask(rank.rank)
            if why_not:
                self._tell(rank.rank, why_not)
        self._tick(0)

    def _ask(self, number: int) -> str:
        """Ask a rank to prepare; return for people why it cannot be asked."""
        process = self._ranks.processes.get(number)
        if process is None:
            return STARTING if self._ranks.pending else "it has ended"
        if why_not := self._ranks.why_mute(number):
            return STARTING if why_not == NOT_BEGUN else why_not
        line, path = self._ranks.lines[number], self._ranks.file(number, f"profile-{self._order.serial}")
        if not (line.ticks and line.signals[0]):
            return TAKEN
        if path is None:
            return "there is no folder for temporary files"
        asked = _Asked(process, line.ticks, path)
        if not line.profiled and asked.catches(line.ticks):
            return TAKEN  # its program catches that signal
        line.profiled = True
        places = most_places(self._ranks.plan.world_size)
        numbers = (line.ticks, int(self._began * 1e9), int(PERIOD * 1e9), self._ticks, places, self._order.torch)
        asked.forget()
        line.say(b"p %d %d %d %d %d %d " % numbers + os.fsencode(path))
        if not line.answers:
            asked.send(line.signals[0])
        self._asked[number] = asked
        return ""

    def _tick(self, number: int) -> None:
        if number == self._ticks or not self._asked:
            return self._finish()
        for asked in self._asked.values():
            asked.send(asked.tick)
        next_one = max(number + 1, int((time.monotonic() - self._began) / PERIOD) + 1)
        next_one = min(next_one, self._ticks)
        self._loop.after(self._began + next_one * PERIOD - time.monotonic(), lambda: self._tick(next_one))

    def _finish(self) -> None:
        for number, asked in self._asked.items():
            line = self._ranks.lines.get(number)
            if line is not None:
                line.catch_up()
                line.say(b"q")
                if not line.answers:
                    asked.send(line.signals[0])
        self._collect(time.monotonic() + PATIENCE)

    def _collect(self, deadline: float) -> None:
        """Take what has been told so far; one rank a turn, so that beats leave in time."""
        late = time.monotonic() > deadline
        for number, asked in list(self._asked.items()):
            last = late or number not in self._ranks.processes
            whole = not self._order.torch or os.path.exists(asked.torch)
            if os.path.exists(asked.path) and (whole or last):
                self._take(number, asked)
                break
            if last:
                del self._asked[number]
                line = self._ranks.lines.get(number)
                silent = "it did not answer" if line and line.signals[0] else TAKEN
                self._tell(number, silent if late else "it has ended")
                asked.forget()
            elif self._order.torch:
                asked.send(asked.tick)  # on which torch's profiler ends
        if self._asked:
            self._loop.after(0 if late else _LOOK, lambda: self._collect(deadline))
        else:
            self._done()

    def _take(self, number: int, asked: _Asked) -> None:
        del self._asked[number]
        plan = self._ranks.plan
        began = time.time() - time.monotonic() + self._began
        try:
            told = read_regular(asked.path, _MAX, links=False)
            host = plan.rank_of(number).host or ""
            profile = read_profile(told, number, host, began, self._order.seconds, plan.world_size, os.getcwd())
            self._hear(replace(profile, torch=asked.torch) if os.path.exists(asked.torch) else profile)
        except (OSError, ValueError, LookupError, TypeError):  # the program has written it, or the disk is full
            self._tell(number, "its profile cannot be read")
        asked.forget()

    def _tell(self, number: int, why_not: str) -> None:
        self._hear(RankProfile(number, self._ranks.plan.rank_of(number).host or "", why_not))


class _Asked:
    """A rank of which a profile is taken; ``tick`` is its signal for that, ``path`` the file that it tells in."""

    def __init__(self, process: RankProcess, tick: int, path: str) -> None:
        self._process, self.tick, self.path = process, tick, path
        self.torch = f"{path}.torch"  # the file of torch's own profiler, which goes with the job or is taken away

    def send(self, number: int) -> None:
        """Send a signal where the process catches it."""
        if self.catches(number):
            self._process.send(number)

    def catches(self, number: int) -> bool:
        """Whether it does, and has none waiting, as one has that is stopped."""
        with suppress(OSError, ValueError):
            caught, waiting = signal_sets(self._process.pid, b"SigCgt", b"ShdPnd")
            return has(caught & ~waiting, number)
        return False

    def forget(self) -> None:
        """Remove what it has told."""
        for path in (self.path, f"{self.path}.part"):
            with suppress(OSError):
                os.unlink(path)
