"""What each field of a message may hold, beyond its type: numbers in their ranges, harmless texts of bounded length.

All that comes from another process, which may be broken or hostile, is checked here on arrival (``wire``). A text is
mended; any other field that makes no sense makes the message invalid. What only the state of the job can tell is
checked where that state is: ``seat`` and ``member``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, lru_cache
from operator import is_
from typing import Any, TypeVar

from ddplaunch.control import MIN_HEARTBEAT
from ddplaunch.control.failure import MAX_LINE, MAX_TAIL, Failure, Outcome, readable
from ddplaunch.control.relay import FOR_RANKS
from ddplaunch.dataclass import replace
from ddplaunch.errors import shown

MANY = 10_000_000  # more ranks, nodes, attempts or restarts than any job has
MAX_PATH = 4096  # characters
WEEK = 7 * 86400.0  # seconds: the longest time that an option takes
WEEK_US = int(WEEK) * 1_000_000

M = TypeVar("M")
Check = Callable[[Any], Any]  # returns the value as it may be used; raises ValueError if it makes no sense


def _number(lowest: float, highest: float) -> Check:
    def check(value: float) -> float:
        if not lowest <= value <= highest:  # nor is NaN
            raise ValueError("a number out of range")
        return value

    return check


def _letters(limit: int, *, in_path: bool = False) -> Check:
    """A name, which must arrive unchanged: it is compared, or is part of a path or of a variable."""

    def check(text: str) -> str:
        leads_elsewhere = in_path and (text.startswith(".") or "/" in text)
        if len(text) > limit or not text.isprintable() or leads_elsewhere:
            raise ValueError("an invalid name")
        return text

    return check


def _all_within(lowest: int, highest: int) -> Check:
    """As ``_each`` of ``_number``, for thousands of them."""

    def check(values: tuple[int, ...]) -> tuple[int, ...]:
        if values and not lowest <= min(values) <= max(values) <= highest:
            raise ValueError("a number out of range")
        return values

    return check


def _line(text: str) -> str:
    return shown(" ".join(text.splitlines()), MAX_LINE)


def _path(text: str) -> str:
    """One that is opened, and shown to people only as ``errors.shown`` has it."""
    if len(text) > MAX_PATH or "\0" in text:
        raise ValueError("an invalid path")
    return text


def _hint(text: str) -> str:
    return "\n".join(map(_line, text.split("\n")[:2]))


def _text(text: str) -> str:
    return readable(text).rstrip("\n")


def _each(check: Check) -> Check:
    def check_each(values: tuple[Any, ...]) -> tuple[Any, ...]:
        checked = tuple([check(value) for value in values])
        return values if all(map(is_, checked, values)) else checked

    return check_each


def bounded(value: M) -> M:
    """Return a message, or a part of one, as it may be acted upon; a ValueError where a field of it makes no sense."""
    kind: type = type(value)
    changed: dict[str, Any] = {}
    for name, check in _checks(kind):
        old = getattr(value, name)
        if old is not None and (new := check(old)) is not old:
            changed[name] = new
    together = _TOGETHER.get(kind)
    if together is not None and not together(value):
        raise ValueError("fields that contradict each other")
    return replace(value, **changed) if changed else value  # type: ignore[type-var]  # it is a dataclass


@cache
def _checks(kind: type) -> tuple[tuple[str, Check], ...]:
    return tuple((each.name, check_of(kind, each.name)) for each in fields(kind))


def check_of(kind: type, name: str) -> Check:
    """The check of a field; a KeyError where it has none."""
    return BOUNDS.get(f"{kind.__name__}.{name}") or BOUNDS[name]


def _complaint(refused: tuple[str, str | None]) -> tuple[str, str | None]:
    message, hint = refused
    return _line(message), None if hint is None else _hint(hint)


def _as_it_is(value: Any) -> Any:
    return value


def _stopping(number: int) -> int:
    if number not in (1, 2, 3, 15):  # SIGHUP, SIGINT, SIGQUIT, SIGTERM: what people and schedulers end a job with
        raise ValueError("a signal that ends no job")
    return number


def _for_ranks(number: int) -> int:
    if number not in FOR_RANKS:
        raise ValueError("a signal that is not for ranks")
    return number


_COUNT = _number(0, MANY)
_EPOCH = _number(0, 1e11)
_SECONDS = _number(0, WEEK)
_NAME = _letters(255)

BOUNDS: Mapping[str, Check] = {
    # numbers
    **dict.fromkeys(("attempt", "rank", "local_rank", "node_rank", "stopped", "world_size", "serial"), _COUNT),
    **dict.fromkeys(("joined", "min_nodes", "max_nodes", "ddplaunch"), _COUNT),
    **dict.fromkeys(("missing", "alike"), _each(_COUNT)),
    **dict.fromkeys(("moment", "clock", "heard"), _EPOCH),
    **dict.fromkeys(("grace", "wait", "window", "within", "held", "gpu_memory_timeout"), _SECONDS),
    "max_restarts": _number(0, 1 << 64),
    "heartbeat_timeout": _number(MIN_HEARTBEAT, WEEK),
    "pid": _number(0, 1 << 31),
    "code": _number(0, 255),
    "exit_code": _number(1, 255),
    "signal": _stopping,
    "Failure.signal": _number(1, 64),
    "Warned.signal": _number(1, 64),
    "ForRanks.number": _for_ranks,
    # names
    **dict.fromkeys(("host", "nnodes", "fingerprint", "nonce", "proof", "address", "interface"), _NAME),
    **dict.fromkeys(("python", "torch", "cuda", "nccl"), _NAME),
    **dict.fromkeys(("devices", "gpus"), lru_cache(16)(_each(_NAME))),  # alike on 10,000 nodes
    **dict.fromkeys(("Place.nnodes", "first_rank", "machine", "machines", "sharing"), _COUNT),
    "target": _letters(8192),
    "run_id": _letters(255, in_path=True),
    # what is said at the door of a running job
    "restarts": _COUNT,
    **dict.fromkeys(("began", "since"), _EPOCH),
    "Status.attempt": _number(-1, MANY),
    "RankStatus.code": _number(-64, 255),
    "Status.target": _line,
    "ranks": _each(bounded),
    **dict.fromkeys(("state", "now"), _as_it_is),
    # what ranks were found doing
    **dict.fromkeys(("line", "enqueued", "completed", "number"), _number(-1, 1 << 62)),
    **dict.fromkeys(("group", "operation"), _line),
    **dict.fromkeys(("function", "file", "name", "description", "tensors", "no_stack", "awaits"), _line),
    **dict.fromkeys(("timeout", "cpu", "quiet", "standstill", "busy", "traffic", "network"), _number(0, 1e18)),
    "Inside.names": _COUNT,
    "inside": lambda it: bounded(it),
    "entered": _EPOCH,
    "GroupState.completed": _number(-1, 1 << 62),
    "Collective.completed": _as_it_is,
    **dict.fromkeys(("RankInspection.code", "Worker.code"), _number(-64, 255)),
    "gaps": _all_within(-WEEK_US, WEEK_US),
    "Arrivals.number": _number(0, 1 << 62),
    "collectives": _number(1, 1 << 62),
    **dict.fromkeys(("frames", "threads", "groups", "last", "known", "arrivals", "workers"), _each(bounded)),
    "Share.threads": _NAME,
    "Group.ranks": _each(_COUNT),
    **dict.fromkeys(("silent", "Inspection.pace"), _each(_line)),
    **dict.fromkeys(("condition", "own", "answers", "moved", "alone", "node_only", "detail"), _as_it_is),
    "TailRanks.ranks": _each(_COUNT),
    "missed": _number(0, 1 << 62),
    **dict.fromkeys(("follow", "data"), _as_it_is),
    # what is kept of a run
    **dict.fromkeys(("ended", "started"), _EPOCH),
    **dict.fromkeys(("run", "cwd", "why", "RunRecord.target"), _line),
    "log_dir": _path,
    **dict.fromkeys(("argv", "notes"), _each(_line)),
    **dict.fromkeys(("peak_memory", "born"), _number(0, 1 << 62)),
    **dict.fromkeys(("RunRecord.nnodes", "left_out"), _COUNT),
    "RunRecord.signal": _number(1, 64),
    "RankRecord.code": _number(-64, 255),
    **dict.fromkeys(("attempts", "inspections"), _each(bounded)),
    "fate": _as_it_is,
    # what people read
    **dict.fromkeys(("message", "remark", "how", "blame"), _line),
    "hint": _hint,
    "Failure.hint": _line,
    **dict.fromkeys(("Failure.message", "traceback", "text"), _text),
    "tail": lambda lines: _each(_line)(lines[-MAX_TAIL:]),
    "refused": _complaint,
    # what has fields of its own, or two values only
    **dict.fromkeys(
        ("share", "place", "versions", "failure", "verdict", "first", "outcome", "broken", "status", "inspection"),
        bounded,
    ),
    **dict.fromkeys(("shares", "failures", "others"), _each(bounded)),
    **dict.fromkeys(("numbered", "again", "direct", "preemption_seen", "kind"), _as_it_is),
}
"""The check of each field by its name, where one class has another by both names; None is always itself."""

_TOGETHER: Mapping[type, Callable[[Any], bool]] = {  # what the fields of a class must be together
    Failure: lambda it: (it.exit_code is None) is not (it.signal is None),
    Outcome: lambda it: it.code != 0 or not (it.verdict or it.refused),
}
