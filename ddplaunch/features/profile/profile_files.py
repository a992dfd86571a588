"""Converts profiles to files for viewers: a trace for Perfetto and chrome://tracing, and a file for speedscope."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ddplaunch import __version__
from ddplaunch.base.stack_frames import Frame
from ddplaunch.features.profile.rank_profile import TICK_INTERVAL_S, RankProfile
from ddplaunch.features.profile.torch_trace import Event, first_begin_s, torch_events
from ddplaunch.observe.diagnosis.rank_position import PACKAGE_PATH

_STACKS, _COLLECTIVES = 1, 1000  # thread ids in a rank's process of the trace; each lane of collectives is a thread
_MAX_TORCH_LEAD_S = 60.0  # torch's profiler begins at most this long before the first tick
_ROUNDING_S = 1e-5  # more than is lost by microseconds since the epoch in a float
_SPEEDSCOPE = "https://www.speedscope.app/file-format-schema.json"


def perfetto_trace(profiles: Sequence[RankProfile], of_torch: Mapping[int, str]) -> Iterator[Event]:
    """Yield events of the trace event format: a process for each rank, with its calls and lanes of collectives.

    ``of_torch``: the files of torch's own profiler on this machine, by rank. Their events are included; the files are
    read one at a time, as one has tens of megabytes, and twice: the first event of all ranks is at time zero.
    """
    zero = _time_zero(profiles, of_torch)
    last: dict[tuple[str, int], float] = {}  # when the last rank entered a collective
    for each in profiles:
        for kind, number, begin, _ in each.collectives():
            last[kind.group, number] = max(begin, last.get((kind.group, number), begin))
    for profile in profiles:
        yield from _call_events(profile, zero)
        yield from _collective_events(profile, zero, last)
        if path := of_torch.get(profile.rank):
            yield from torch_events(path, profile.rank, zero + profile.clock_offset_s)


def _time_zero(profiles: Sequence[RankProfile], of_torch: Mapping[int, str]) -> float:
    """Return when the first event of all begins: times must not be negative, and torch's profiler begins first."""
    began = min((each.began for each in profiles), default=0.0)
    of_files = (first_begin_s(of_torch[each.rank]) - each.clock_offset_s for each in profiles if each.rank in of_torch)
    earliest = min(of_files, default=math.inf) - _ROUNDING_S
    return max(min(began, earliest), began - _MAX_TORCH_LEAD_S)  # the program can write any time into the files


def _call_events(profile: RankProfile, zero: float) -> Iterator[Event]:
    host = f" ({profile.host})" if profile.host else ""
    yield _make_name_event(profile.rank, 0, "process_name", f"rank {profile.rank}{host}")
    yield {"ph": "M", "pid": profile.rank, "name": "process_sort_index", "args": {"sort_index": profile.rank}}
    yield _make_name_event(profile.rank, _STACKS, "thread_name", "main thread")
    began = (profile.began - zero) * 1e6
    open_calls: list[tuple[str, Frame, int]] = []  # the outermost first: name, frame, tick of its begin
    now = 0
    for place, ticks in [*profile.tick_runs(), (0, 0)]:
        stack = [(_name(frame), frame) for frame in reversed(profile.stack(place))]
        same = 0
        while same < min(len(stack), len(open_calls)) and stack[same][0] == open_calls[same][0]:
            same += 1
        for name, frame, begin in open_calls[same:]:
            where = {"file": frame.file, "line": frame.line}
            times = (began + begin * TICK_INTERVAL_S * 1e6, (now - begin) * TICK_INTERVAL_S * 1e6)
            yield _make_slice(profile.rank, _STACKS, name, "stack", *times, where)
        open_calls[same:] = [(name, frame, now) for name, frame in stack[same:]]
        now += ticks


def _name(frame: Frame) -> str:
    """Return the name of a call with its file, and in the user's code also with the line."""
    where = f"{frame.file}:{frame.line}" if frame.own else PACKAGE_PATH.sub("", frame.file)
    return f"{frame.function} {where}"


def _collective_events(profile: RankProfile, zero: float, last: dict[tuple[str, int], float]) -> Iterator[Event]:
    """Yield the collectives of a rank; those that overlap, as in several groups, are in different lanes."""
    lanes: list[float] = []  # when the last one in each ends
    for kind, number, begin, ended in sorted(profile.collectives(), key=lambda each: each[2]):
        end = max(ended or last[kind.group, number], begin)
        lane = next((index for index, until in enumerate(lanes) if until <= begin), len(lanes))
        if lane == len(lanes):
            lanes.append(end)
            yield _make_name_event(profile.rank, _COLLECTIVES + lane, "thread_name", "collectives")
        lanes[lane] = end
        details: dict[str, object] = {
            "number": number,
            "group": kind.description or kind.group,
            "tensors": kind.tensors,
            "ends": "when it completed" if ended else "when the last rank came: its own end is not recorded",
        }
        name, times = f"{kind.operation} {kind.tensors}".rstrip(), ((begin - zero) * 1e6, (end - begin) * 1e6)
        yield _make_slice(profile.rank, _COLLECTIVES + lane, name, "collective", *times, details)


def _make_slice(
    rank: int, thread: int, name: str, kind: str, begin: float, length: float, details: dict[str, object]
) -> Event:
    # Whole nanoseconds: slices with the same end get equal ends.
    first, last = round(begin, 3), round(begin + length, 3)
    times = {"ts": first, "dur": round(last - first, 3)}
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, "cat": kind, **times, "args": details}


def _make_name_event(rank: int, thread: int, what: str, name: str) -> Event:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": {"name": name}}


def speedscope_file(profiles: Iterable[RankProfile], title: str) -> dict[str, object]:
    """Build a file of speedscope: a sampled profile for each rank."""
    frames: dict[Frame, int] = {}
    of_ranks = []
    for profile in profiles:
        samples = [
            [frames.setdefault(frame, len(frames)) for frame in reversed(profile.stack(place))]
            for place, _ in profile.tick_runs()
        ]
        weights = [ticks * TICK_INTERVAL_S for _, ticks in profile.tick_runs()]
        end = profile.tick_count * TICK_INTERVAL_S
        times = {"unit": "seconds", "startValue": 0, "endValue": end, "samples": samples, "weights": weights}
        of_ranks.append({"type": "sampled", "name": f"rank {profile.rank}", **times})
    known = [{"name": frame.function, "file": frame.file, "line": frame.line} for frame in frames]
    return {
        "$schema": _SPEEDSCOPE,
        "name": title,
        "exporter": f"ddplaunch {__version__}",
        "activeProfileIndex": 0,
        "shared": {"frames": known},
        "profiles": of_ranks,
    }
