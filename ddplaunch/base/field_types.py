"""Annotated types for the fields of messages: numbers with ranges, sanitized texts of bounded length.

All that comes from another process, which may be broken or hostile, is checked by these on arrival (``typed``). A text
to print is sanitized; any other invalid field makes the message invalid. Constraints between fields are checked in the
``__post_init__`` of the class, those that depend on the state of the job by the code that has that state.

Other modules import this for type checking only: ``typed`` finds these types by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any
from typing import Literal as Literal

from ddplaunch.base.errors import MAX_LINE_CHARS, MAX_TAIL_LINES, sanitize_line, sanitize_text

MAX_COUNT = 10_000_000  # more ranks, nodes, attempts or restarts than any job has
MAX_PATH = 4096  # characters
WEEK_S = 7 * 86400.0  # the longest duration that an option accepts
_WEEK_US = int(WEEK_S) * 1_000_000
_MAX_INT = 1 << 62

Validator = Callable[[Any], Any]  # returns the value, sanitized if need be; raises ValueError if it is invalid


def _int_or_float_in_range(lowest: float, highest: float) -> Validator:
    def check(value: float) -> float:
        if not lowest <= value <= highest:  # also true for NaN
            raise ValueError("a number out of range")
        return value

    return check


def _all_in_range(lowest: int, highest: int) -> Validator:
    """As ``_int_or_float_in_range``, for a tuple of thousands."""

    def check(values: tuple[int, ...]) -> tuple[int, ...]:
        if values and not lowest <= min(values) <= max(values) <= highest:
            raise ValueError("a number out of range")
        return values

    return check


def _stop_signal(number: int) -> int:
    if number not in (1, 2, 3, 15):  # SIGHUP, SIGINT, SIGQUIT, SIGTERM: what users and schedulers send
        raise ValueError("a signal that ends no job")
    return number


def _validate_name(limit: int, *, in_path: bool = False) -> Validator:
    """A name: not sanitized but rejected, as it is compared, or becomes part of a path or a variable."""

    def check(text: str) -> str:
        leaves_folder = in_path and (text.startswith(".") or "/" in text)
        if len(text) > limit or not text.isprintable() or leaves_folder:
            raise ValueError("an invalid name")
        return text

    return check


def _validate_path(text: str) -> str:
    if len(text) > MAX_PATH or "\0" in text:
        raise ValueError("an invalid path")
    return text


def _validate_line(text: str) -> str:
    if len(text) <= MAX_LINE_CHARS and text.isprintable():
        return text
    return sanitize_line(" ".join(text.splitlines()), MAX_LINE_CHARS)


def _lines_validator(most: int) -> Validator:
    return lambda text: "\n".join(map(_validate_line, text.split("\n")[:most]))


def _validate_text(text: str) -> str:
    return sanitize_text(text).rstrip("\n")


Count = Annotated[int, _int_or_float_in_range(0, MAX_COUNT)]
AttemptNumber = Annotated[int, _int_or_float_in_range(-1, MAX_COUNT)]  # of an attempt: -1 before the first
Restarts = Annotated[int, _int_or_float_in_range(0, 1 << 64)]
Pid = Annotated[int, _int_or_float_in_range(0, 1 << 31)]
Size = Annotated[int, _int_or_float_in_range(0, _MAX_INT)]  # bytes, ticks, counters of a run
Number = Annotated[int, _int_or_float_in_range(-1, _MAX_INT)]  # of a collective in its group, or of a line of a file
ExitCode = Annotated[int, _int_or_float_in_range(0, 255)]
ExitStatus = Annotated[int, _int_or_float_in_range(-64, 255)]  # of a process: -N for signal N
Signal = Annotated[int, _int_or_float_in_range(1, 64)]
StopSignal = Annotated[int, _stop_signal]
Timestamp = Annotated[float, _int_or_float_in_range(0, 1e11)]  # seconds since the epoch
Seconds = Annotated[float, _int_or_float_in_range(0, WEEK_S)]
ClockDifference = Annotated[float, _int_or_float_in_range(-1e11, 1e11)]  # seconds between two clocks
NonNegativeFloat = Annotated[float, _int_or_float_in_range(0, 1e18)]
MicrosecondGaps = Annotated[tuple[int, ...], _all_in_range(-_WEEK_US, _WEEK_US)]  # microseconds
IntTable = Annotated[tuple[int, ...], _all_in_range(0, _MAX_INT)]  # numbers, row after row

Name = Annotated[str, _validate_name(255)]
RunId = Annotated[str, _validate_name(255, in_path=True)]
CommandText = Annotated[str, _validate_name(8192)]  # a command line, which nodes compare
Path = Annotated[str, _validate_path]  # is opened; printed only through ``errors.sanitize_line``

TextLine = Annotated[str, _validate_line]
Hint = Annotated[str, _lines_validator(2)]
ShortText = Annotated[str, _lines_validator(4)]
Text = Annotated[str, _validate_text]  # many lines
ErrorText = tuple[TextLine, Hint | None]  # of a LaunchError: message and hint
TailLines = Annotated[tuple[TextLine, ...], lambda lines: lines[-MAX_TAIL_LINES:]]
