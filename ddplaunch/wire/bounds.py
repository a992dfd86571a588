"""What a field of a message may hold, as its type: numbers in their ranges, harmless texts of bounded length.

All that comes from another process, which may be broken or hostile, is checked by these on arrival (``typed``). A text
for people is mended; any other field that makes no sense makes the message invalid. What several fields must be
together says the class, in ``__post_init__``; what only the state of the job can tell is checked where that state is.

Imported for type checking alone: who takes in a message finds these types by their names (``typed``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any
from typing import Literal as Literal

from ddplaunch.errors import MAX_LINE, MAX_TAIL, readable, shown

MANY = 10_000_000  # more ranks, nodes, attempts or restarts than any job has
MAX_PATH = 4096  # characters
WEEK = 7 * 86400.0  # seconds: the longest time that an option takes
_WEEK_US = int(WEEK) * 1_000_000
_HUGE = 1 << 62

Check = Callable[[Any], Any]  # returns the value as it may be used; raises ValueError if it makes no sense


def _number(lowest: float, highest: float) -> Check:
    def check(value: float) -> float:
        if not lowest <= value <= highest:  # nor is NaN
            raise ValueError("a number out of range")
        return value

    return check


def _all_within(lowest: int, highest: int) -> Check:
    """As ``_number``, for thousands of them."""

    def check(values: tuple[int, ...]) -> tuple[int, ...]:
        if values and not lowest <= min(values) <= max(values) <= highest:
            raise ValueError("a number out of range")
        return values

    return check


def _stopping(number: int) -> int:
    if number not in (1, 2, 3, 15):  # SIGHUP, SIGINT, SIGQUIT, SIGTERM: what people and schedulers end a job with
        raise ValueError("a signal that ends no job")
    return number


def _letters(limit: int, *, in_path: bool = False) -> Check:
    """A name, which must arrive unchanged: it is compared, or is part of a path or of a variable."""

    def check(text: str) -> str:
        leads_elsewhere = in_path and (text.startswith(".") or "/" in text)
        if len(text) > limit or not text.isprintable() or leads_elsewhere:
            raise ValueError("an invalid name")
        return text

    return check


def _path(text: str) -> str:
    if len(text) > MAX_PATH or "\0" in text:
        raise ValueError("an invalid path")
    return text


def _line(text: str) -> str:
    if len(text) <= MAX_LINE and text.isprintable():
        return text
    return shown(" ".join(text.splitlines()), MAX_LINE)


def _lines(most: int) -> Check:
    return lambda text: "\n".join(map(_line, text.split("\n")[:most]))


def _text(text: str) -> str:
    return readable(text).rstrip("\n")


Count = Annotated[int, _number(0, MANY)]
Ordinal = Annotated[int, _number(-1, MANY)]  # of an attempt: -1 before the first
Restarts = Annotated[int, _number(0, 1 << 64)]
Pid = Annotated[int, _number(0, 1 << 31)]
Size = Annotated[int, _number(0, _HUGE)]  # bytes, ticks, what a run counts
Number = Annotated[int, _number(-1, _HUGE)]  # of a collective in its group, or of a line of a file
ExitCode = Annotated[int, _number(0, 255)]
EndCode = Annotated[int, _number(-64, 255)]  # of a process: -N for signal N
Signal = Annotated[int, _number(1, 64)]
StopSignal = Annotated[int, _stopping]
Moment = Annotated[float, _number(0, 1e11)]  # seconds since the epoch
Seconds = Annotated[float, _number(0, WEEK)]
Shift = Annotated[float, _number(-1e11, 1e11)]  # seconds between two clocks
Amount = Annotated[float, _number(0, 1e18)]
Gaps = Annotated[tuple[int, ...], _all_within(-_WEEK_US, _WEEK_US)]  # microseconds
Table = Annotated[tuple[int, ...], _all_within(0, _HUGE)]  # numbers, row after row

Name = Annotated[str, _letters(255)]
RunId = Annotated[str, _letters(255, in_path=True)]
Typed = Annotated[str, _letters(8192)]  # what was typed, which nodes compare
Path = Annotated[str, _path]  # is opened, and shown to people only as ``errors.shown`` has it

Line = Annotated[str, _line]
Hint = Annotated[str, _lines(2)]
Why = Annotated[str, _lines(4)]
Text = Annotated[str, _text]  # many
Complaint = tuple[Line, Hint | None]  # an error as users meet it: message and hint
Tail = Annotated[tuple[Line, ...], lambda lines: lines[-MAX_TAIL:]]
