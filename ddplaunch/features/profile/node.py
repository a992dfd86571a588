"""Profiles this node's ranks: sends each a signal (a tick) at intervals, then reads the profile that it has written.

A rank starts to handle the signal when a profile is requested (``profile_sampler.py``). Right before each signal, /proc
shows whether the process handles it: an exec clears handlers, and the signal would then kill.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from msgspec.structs import replace

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.safe_files import current_folder, read_regular_file
from ddplaunch.core.agent.node_ranks import NodeRanks, RankProcess
from ddplaunch.core.agent.rank_channel import RankChannel
from ddplaunch.core.messages import RpcRequest
from ddplaunch.core.rpc_kind import Reply
from ddplaunch.features.profile.rank_profile import (
    STARTING,
    TICK_INTERVAL_S,
    TORCH_START_S,
    RankProfile,
    max_places,
    parse_profile,
)
from ddplaunch.observe.node.rank_inspector import NOT_BEGUN, why_not_inspectable
from ddplaunch.observe.node.rank_stack_dump import NO_SIGNAL_ERROR
from ddplaunch.system.processes.proc_utils import contains_signal, read_signal_sets

_TRANSFER_S = 4.0  # for the replies. Before that, ranks have 5 s after the last tick to write: the GIL may be held
_START_DELAY_S = 0.1  # for ranks to install the signal handler
_POLL_INTERVAL_S = 0.02  # between two checks for result files
_MAX_RESULT_BYTES = 64 << 20
_MAX_STATE_BYTES = 100

_NO_TORCH = {
    b"no torch": "it has not imported torch",
    b"own profiler": "its program runs a profiler of its own",
    b"failed": "torch's profiler could not be started",
    b"started": "its program started a profiler of its own, or did not return from a call in time",
    b"": f"it was in a call that took longer than {TORCH_START_S:g} s, or torch's profiler took that long to start",
}
"""By the state that a rank has written: why there are no data of torch's profiler."""


class NodeProfiler:
    """Takes one profile of this node's ranks, from ``start`` until the last reply."""

    def __init__(self, loop: EventLoop, ranks: NodeRanks, request: RpcRequest, reply: Reply) -> None:
        """``reply`` is called with the profile of each rank, then with None."""
        self._loop, self._ranks, self._reply = loop, ranks, reply
        self._serial, self._request = request.serial, request.payload
        self._deadline = time.monotonic() + request.timeout_s - _TRANSFER_S
        torch_s = TORCH_START_S if self._request.torch else 0.0
        seconds = min(self._request.seconds, request.timeout_s - torch_s - _TRANSFER_S)  # never beyond the deadline
        self._ticks = max(1, round(seconds / TICK_INTERVAL_S))
        self._pending: dict[int, _ProfiledRank] = {}  # the ranks without a result yet
        self._began = 0.0  # by time.monotonic()

    def start(self) -> None:
        """Request the profiles; with torch's, profiling begins once all ranks of this node have started it."""
        self._began = time.monotonic() + (2 * TORCH_START_S if self._request.torch else _START_DELAY_S)
        for rank in self._ranks.plan.local_ranks:
            why_not = self._prepare_rank(rank.rank)
            if why_not:
                self._report_missing(rank.rank, why_not)
        if self._request.torch:
            self._await_torch(time.monotonic() + TORCH_START_S)
        else:
            self._send_tick(0)

    def _await_torch(self, until: float) -> None:
        waits = any(number in self._ranks.processes and not each.torch_state for number, each in self._pending.items())
        if waits and time.monotonic() < until:
            self._loop.call_later(_POLL_INTERVAL_S, lambda: self._await_torch(until))
            return
        self._began = time.monotonic() + _START_DELAY_S
        for number, profiled in self._pending.items():
            if (channel := self._ranks.channels.get(number)) is not None:
                self._request_profile(channel, profiled)
        self._send_tick(0)

    def _prepare_rank(self, number: int) -> str:
        """Request a profile of a rank; return why it cannot be profiled, for users, or ""."""
        process = self._ranks.processes.get(number)
        if process is None:
            return STARTING if self._ranks.attempt.not_spawned else "it has ended"
        if why_not := why_not_inspectable(self._ranks, number):
            return STARTING if why_not == NOT_BEGUN else why_not
        channel, path = self._ranks.channels[number], self._ranks.rank_file_path(number, f"profile-{self._serial}")
        if (tick := channel.signals.get("profile")) is None:
            return STARTING  # in the rank, the endpoint for inspections has begun, the side for profiles has not
        if not (tick and channel.stack_signals[0]):
            return NO_SIGNAL_ERROR
        if path is None:
            return "there is no folder for temporary files"
        profiled = _ProfiledRank(process, tick, path)
        if "profile" not in channel.used_signals and profiled.catches_signal(tick):
            return NO_SIGNAL_ERROR  # its program catches that signal
        channel.used_signals.add("profile")
        self._request_profile(channel, profiled)
        self._pending[number] = profiled
        return ""

    def _request_profile(self, channel: RankChannel, profiled: _ProfiledRank) -> None:
        times = int(self._began * 1e9), int(TICK_INTERVAL_S * 1e9), self._ticks
        numbers = (profiled.tick, *times, max_places(self._ranks.plan.world_size), self._request.torch)
        channel.write_line(b"p %d %d %d %d %d %d " % numbers + os.fsencode(profiled.path))
        if not channel.has_thread:
            profiled.send_signal(channel.stack_signals[0])

    def _send_tick(self, number: int) -> None:
        if number == self._ticks or not self._pending:
            return self._on_last_tick()
        for profiled in self._pending.values():
            profiled.send_signal(profiled.tick)
        next_one = max(number + 1, int((time.monotonic() - self._began) / TICK_INTERVAL_S) + 1)
        next_one = min(next_one, self._ticks)
        self._loop.call_later(
            self._began + next_one * TICK_INTERVAL_S - time.monotonic(), lambda: self._send_tick(next_one)
        )

    def _on_last_tick(self) -> None:
        for number, profiled in self._pending.items():
            channel = self._ranks.channels.get(number)
            if channel is not None:
                channel.read_pending()
                channel.write_line(b"q")
                if not channel.has_thread:
                    profiled.send_signal(channel.stack_signals[0])
        self._collect_results()

    def _collect_results(self) -> None:
        """Read the results written so far; one rank per turn of the event loop, as heartbeats must not wait."""
        late = time.monotonic() > self._deadline
        for number, profiled in list(self._pending.items()):
            last = late or number not in self._ranks.processes
            is_complete = profiled.torch_state != b"started" or os.path.exists(profiled.torch)
            if os.path.exists(profiled.path) and (is_complete or last):
                self._read_result(number, profiled)
                break
            if last:
                del self._pending[number]
                channel = self._ranks.channels.get(number)
                silent = "it did not respond" if channel and channel.stack_signals[0] else NO_SIGNAL_ERROR
                self._report_missing(number, silent if late else "it has ended")
                profiled.remove_file()
            elif self._request.torch:
                profiled.send_signal(profiled.tick)  # in its handler torch's profiler ends
        if self._pending:
            self._loop.call_later(0 if late else _POLL_INTERVAL_S, self._collect_results)
        else:
            self._reply(None, True)

    def _read_result(self, number: int, profiled: _ProfiledRank) -> None:
        del self._pending[number]
        plan = self._ranks.plan
        began = time.time() - time.monotonic() + self._began
        try:
            result = read_regular_file(profiled.path, _MAX_RESULT_BYTES, follow_symlinks=False)
            host = plan.rank_of(number).host or ""
            profile = parse_profile(
                result, number, host, began, self._request.seconds, plan.world_size, current_folder()
            )
            if os.path.exists(profiled.torch):
                profile = replace(profile, torch=profiled.torch)
            elif self._request.torch:
                profile = replace(profile, no_torch=_NO_TORCH.get(profiled.torch_state, _NO_TORCH[b"failed"]))
            self._reply(profile, False)
        except (OSError, ValueError, LookupError, TypeError):  # the program has written it, or the disk is full
            self._report_missing(number, "its profile cannot be read")
        profiled.remove_file()

    def _report_missing(self, number: int, why_not: str) -> None:
        self._reply(RankProfile(number, self._ranks.plan.rank_of(number).host or "", why_not), False)


class _ProfiledRank:
    """A rank being profiled; ``tick`` is the signal, ``path`` the file for its profile."""

    def __init__(self, process: RankProcess, tick: int, path: str) -> None:
        self._process, self.tick, self.path = process, tick, path
        self.torch = f"{path}.torch"  # the file of torch's own profiler; removed with the run, or moved by the client

    def send_signal(self, number: int) -> None:
        """Send a signal if the process handles it."""
        if self.catches_signal(number):
            self._process.send(number)

    def catches_signal(self, number: int) -> bool:
        """Whether the process handles this signal, and none is pending, as in a stopped process."""
        with suppress(OSError, ValueError):
            caught, waiting = read_signal_sets(self._process.pid, b"SigCgt", b"ShdPnd")
            return contains_signal(caught & ~waiting, number)
        return False

    @property
    def torch_state(self) -> bytes:
        """The line that the rank has written about the start of torch's profiler; b"" before that."""
        with suppress(OSError, ValueError):
            return read_regular_file(f"{self.path}.state", _MAX_STATE_BYTES, follow_symlinks=False)
        return b""

    def remove_file(self) -> None:
        """Remove the files of the profile."""
        for path in (self.path, f"{self.path}.part", f"{self.path}.state"):
            with suppress(OSError):
                os.unlink(path)
