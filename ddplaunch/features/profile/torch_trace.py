"""Converts the trace of torch's own profiler in a rank to events of ddplaunch's trace, with times of the same clock.

A rank's threads and the streams of its GPUs become tracks of the rank.

Source: the trace event format, and Kineto's use of it (``output_json.cpp``): times are microseconds after
``baseTimeNanoseconds``; CPU threads are in a process with the rank's pid, each device is a process with its number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from ddplaunch.base.safe_files import read_regular_file

Event = dict[str, Any]

_THREADS = 10_000_000  # first track: larger than the ids of ddplaunch's tracks, of threads and of streams
_MAX = 1 << 30  # bytes


class _TimedEvent(msgspec.Struct):
    """An event of the file, of which only the begin is needed."""

    ph: str = ""
    ts: float = math.inf
    pid: Any = None
    tid: Any = None


class _TimedTrace(msgspec.Struct):
    """The begins of all events, in microseconds after a time."""

    baseTimeNanoseconds: float
    traceEvents: list[_TimedEvent]


def first_begin_s(path: str) -> float:
    """Return when the first event in a file of torch's profiler began, on that file's clock; inf if it has none."""
    try:
        trace = msgspec.json.decode(read_regular_file(path, _MAX, follow_symlinks=False), type=_TimedTrace)
    except (OSError, ValueError):
        return math.inf
    begins = (each.ts for each in trace.traceEvents if each.ph != "M" and type(each.pid) is type(each.tid) is int)
    return (trace.baseTimeNanoseconds / 1e3 + min(begins, default=math.inf)) / 1e6


def torch_events(path: str, rank: int, zero: float) -> Iterator[Event]:
    """Yield the events in a file of torch's profiler; ``zero`` is the begin of ddplaunch's trace on that file's clock.

    An invalid file has none: the program can write there.
    """
    try:
        trace = msgspec.json.decode(read_regular_file(path, _MAX, follow_symlinks=False))
        began = trace["baseTimeNanoseconds"] / 1e3 - zero * 1e6
        events = [each for each in trace["traceEvents"] if isinstance(each.get("pid"), int)]
        labels = {each["pid"]: each["args"]["labels"] for each in events if each["name"] == "process_labels"}
        for each in filter(_is_track, events):
            yield _translate_event(each, rank, labels.get(each["pid"], ""), began)
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return


def _is_track(event: Event) -> bool:
    """Whether an event is on a thread or stream, or names one."""
    return isinstance(event["tid"], int) and (event["ph"] != "M" or event["name"] == "thread_name")


def _translate_event(event: Event, rank: int, process: str, began: float) -> Event:
    translated = {**event, "pid": rank, "tid": _THREADS + event["tid"]}
    if process.startswith("GPU"):
        translated["tid"] += _THREADS * (1 + event["pid"])
    if event["ph"] == "M":
        translated["args"] = {"name": f"torch: {process} {event['args']['name']}".strip()}
    else:
        translated["ts"] = round(event["ts"] + began, 3)
    if "id" in event:  # of an arrow between two slices: ids of ranks must differ
        translated["id"] = f"{rank}.{event['id']}"
    return translated
