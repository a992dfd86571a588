"""Takes a profile of this node's ranks: sends them ticks for some seconds, and reads what each then tells.

A tick is a signal that the rank has begun to catch when a profile was asked of it (``rank/sampler.py``). It goes only
to a process that catches it, as the kernel says right before: an exec clears that, and it would kill.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from ddplaunch.agent.ranks import NOT_BEGUN, NodeRanks, RankProcess
from ddplaunch.agent.signals import contains_signal, read_signal_sets
from ddplaunch.agent.stack_dump import NO_SIGNAL_ERROR
from ddplaunch.control.messages import ProfileRequest
from ddplaunch.dataclass import replace
from ddplaunch.diagnosis.profile import STARTING, TICK_INTERVAL_S, RankProfile, max_places, parse_profile
from ddplaunch.files import read_regular_file
from ddplaunch.loop import EventLoop

RESULT_TIMEOUT_S = 5.0  # seconds after the last tick for ranks to tell, who may hold the GIL
_START_DELAY_S = 0.1  # seconds for ranks to prepare
_POLL_INTERVAL_S = 0.02  # seconds between two looks for what they tell
_MAX_RESULT_BYTES = 64 << 20  # bytes of that


class RankProfiler:
    """One profile, from ``start`` until ``on_done`` is called."""

    def __init__(
        self,
        loop: EventLoop,
        ranks: NodeRanks,
        request: ProfileRequest,
        on_profile: Callable[[RankProfile], None],
        on_done: Callable[[], None],
    ) -> None:
        """``on_profile`` gets the profile of each rank."""
        self._loop, self._ranks, self._order, self._hear, self._done = loop, ranks, request, on_profile, on_done
        self._ticks = max(1, round(request.seconds / TICK_INTERVAL_S))
        self._asked: dict[int, _ProfiledRank] = {}  # the ranks that are still to tell

    def start(self) -> None:
        self._began = time.monotonic() + _START_DELAY_S
        for rank in self._ranks.plan.local_ranks:
            why_not = self._prepare_rank(rank.rank)
            if why_not:
                self._report_missing(rank.rank, why_not)
        self._tick(0)

    def _prepare_rank(self, number: int) -> str:
        """Ask a rank to prepare; return for people why it cannot be asked."""
        process = self._ranks.processes.get(number)
        if process is None:
            return STARTING if self._ranks.not_spawned else "it has ended"
        if why_not := self._ranks.why_not_inspectable(number):
            return STARTING if why_not == NOT_BEGUN else why_not
        line, path = self._ranks.channels[number], self._ranks.rank_file_path(number, f"profile-{self._order.serial}")
        if not (line.profile_signal and line.stack_signals[0]):
            return NO_SIGNAL_ERROR
        if path is None:
            return "there is no folder for temporary files"
        asked = _ProfiledRank(process, line.profile_signal, path)
        if not line.profile_armed and asked.catches_signal(line.profile_signal):
            return NO_SIGNAL_ERROR  # its program catches that signal
        line.profile_armed = True
        places = max_places(self._ranks.plan.world_size)
        numbers = (
            line.profile_signal,
            int(self._began * 1e9),
            int(TICK_INTERVAL_S * 1e9),
            self._ticks,
            places,
            self._order.torch,
        )
        asked.remove_file()
        line.write_line(b"p %d %d %d %d %d %d " % numbers + os.fsencode(path))
        if not line.has_thread:
            asked.send_signal(line.stack_signals[0])
        self._asked[number] = asked
        return ""

    def _tick(self, number: int) -> None:
        if number == self._ticks or not self._asked:
            return self._on_last_tick()
        for asked in self._asked.values():
            asked.send_signal(asked.tick)
        next_one = max(number + 1, int((time.monotonic() - self._began) / TICK_INTERVAL_S) + 1)
        next_one = min(next_one, self._ticks)
        self._loop.call_later(self._began + next_one * TICK_INTERVAL_S - time.monotonic(), lambda: self._tick(next_one))

    def _on_last_tick(self) -> None:
        for number, asked in self._asked.items():
            line = self._ranks.channels.get(number)
            if line is not None:
                line.read_pending()
                line.write_line(b"q")
                if not line.has_thread:
                    asked.send_signal(line.stack_signals[0])
        self._collect(time.monotonic() + RESULT_TIMEOUT_S)

    def _collect(self, deadline: float) -> None:
        """Take what has been told so far; one rank a turn, so that beats leave in time."""
        late = time.monotonic() > deadline
        for number, asked in list(self._asked.items()):
            last = late or number not in self._ranks.processes
            whole = not self._order.torch or os.path.exists(asked.torch)
            if os.path.exists(asked.path) and (whole or last):
                self._read_result(number, asked)
                break
            if last:
                del self._asked[number]
                line = self._ranks.channels.get(number)
                silent = "it did not answer" if line and line.stack_signals[0] else NO_SIGNAL_ERROR
                self._report_missing(number, silent if late else "it has ended")
                asked.remove_file()
            elif self._order.torch:
                asked.send_signal(asked.tick)  # on which torch's profiler ends
        if self._asked:
            self._loop.call_later(0 if late else _POLL_INTERVAL_S, lambda: self._collect(deadline))
        else:
            self._done()

    def _read_result(self, number: int, asked: _ProfiledRank) -> None:
        del self._asked[number]
        plan = self._ranks.plan
        began = time.time() - time.monotonic() + self._began
        try:
            told = read_regular_file(asked.path, _MAX_RESULT_BYTES, follow_symlinks=False)
            host = plan.rank_of(number).host or ""
            profile = parse_profile(told, number, host, began, self._order.seconds, plan.world_size, os.getcwd())
            self._hear(replace(profile, torch=asked.torch) if os.path.exists(asked.torch) else profile)
        except (OSError, ValueError, LookupError, TypeError):  # the program has written it, or the disk is full
            self._report_missing(number, "its profile cannot be read")
        asked.remove_file()

    def _report_missing(self, number: int, why_not: str) -> None:
        self._hear(RankProfile(number, self._ranks.plan.rank_of(number).host or "", why_not))


class _ProfiledRank:
    """A rank of which a profile is taken; ``tick`` is its signal for that, ``path`` the file that it tells in."""

    def __init__(self, process: RankProcess, tick: int, path: str) -> None:
        self._process, self.tick, self.path = process, tick, path
        self.torch = f"{path}.torch"  # the file of torch's own profiler, which goes with the job or is taken away

    def send_signal(self, number: int) -> None:
        """Send a signal where the process catches it."""
        if self.catches_signal(number):
            self._process.send(number)

    def catches_signal(self, number: int) -> bool:
        """Whether it does, and has none waiting, as one has that is stopped."""
        with suppress(OSError, ValueError):
            caught, waiting = read_signal_sets(self._process.pid, b"SigCgt", b"ShdPnd")
            return contains_signal(caught & ~waiting, number)
        return False

    def remove_file(self) -> None:
        """Remove what it has told."""
        for path in (self.path, f"{self.path}.part"):
            with suppress(OSError):
                os.unlink(path)
