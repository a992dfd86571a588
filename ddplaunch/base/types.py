"""The types of message fields, and the functions that parse them from JSON and encode them as JSON.

All that comes from another process or a file, which may be broken or hostile, is checked on arrival: a number or a name
out of its bounds makes the message invalid, a text to print is sanitized. Constraints between fields are checked in the
``__post_init__`` of the class, those that depend on the state of the job by the code that has that state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union

import msgspec
from msgspec import Meta, Struct

from ddplaunch.base.errors import MAX_LINE_CHARS, MAX_TAIL_LINES, sanitize_line, sanitize_text
from ddplaunch.base.frames import ProtocolError, encode_frame

T = TypeVar("T")

JsonValue = None | bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"]
JsonObject = dict[str, JsonValue]
"""The type of values that are written as JSON; values that are read are parsed to more precise types."""

MAX_COUNT = 10_000_000  # more ranks, nodes, attempts or restarts than any job has
MAX_PATH = 4096  # characters
WEEK_S = 7 * 86400.0  # the longest duration that most options accept
MIN_HEARTBEAT_TIMEOUT_S = 2.0  # with less, a busy machine would count as lost
_WEEK_US = int(WEEK_S) * 1_000_000
_MAX_INT = 1 << 62

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
AttemptNumber = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]  # of an attempt: -1 before the first
Restarts = Annotated[int, Meta(ge=0, le=_MAX_INT)]
Pid = Annotated[int, Meta(ge=0, le=1 << 31)]
Size = Annotated[int, Meta(ge=0, le=_MAX_INT)]  # bytes, ticks, counters of a run
Number = Annotated[int, Meta(ge=-1, le=_MAX_INT)]  # the number of a collective in its group, or of a line in a file
ExitCode = Annotated[int, Meta(ge=0, le=255)]
ExitStatus = Annotated[int, Meta(ge=-64, le=255)]  # the exit status of a process: -N for signal N
Signal = Annotated[int, Meta(ge=1, le=64)]
Timestamp = Annotated[float, Meta(ge=0, le=1e11)]  # seconds since the epoch
Seconds = Annotated[float, Meta(ge=0, le=WEEK_S)]
ClockDifference = Annotated[float, Meta(ge=-1e11, le=1e11)]  # seconds between two clocks
NonNegativeFloat = Annotated[float, Meta(ge=0, le=1e18)]
MicrosecondGaps = tuple[Annotated[int, Meta(ge=-_WEEK_US, le=_WEEK_US)], ...]
IntTable = tuple[Size, ...]  # numbers, row after row


def _check_name(text: str, *, limit: int = 255, in_path: bool = False) -> str:
    """Raise ValueError for an unsafe name; names are not sanitized, because they are compared or used in paths."""
    leaves_folder = in_path and (text.startswith(".") or "/" in text)
    if len(text) > limit or not text.isprintable() or leaves_folder:
        raise ValueError("an invalid name")
    return text


def _check_path(text: str) -> str:
    if len(text) > MAX_PATH or "\0" in text:
        raise ValueError("an invalid path")
    return text


def _check_kernel_number(value: int) -> int:
    if not -1 << 70 <= value <= 1 << 70:
        raise ValueError("a number out of range")
    return value


def _clean_line(text: str) -> str:
    if len(text) <= MAX_LINE_CHARS and text.isprintable():
        return text
    return sanitize_line(" ".join(text.splitlines()), MAX_LINE_CHARS)


def _clean_lines(text: str, *, limit: int) -> str:
    return "\n".join(map(_clean_line, text.split("\n")[:limit]))


def _clean_text(text: str) -> str:
    return sanitize_text(text).rstrip("\n")


def _clean_tail(lines: list[str]) -> tuple[str, ...]:
    return tuple(map(_clean_line, lines[-MAX_TAIL_LINES:]))


if TYPE_CHECKING:
    StopSignal = int
    KernelNumber = int
    Name = str
    RunId = str
    CommandText = str
    Path = str
    TextLine = str
    Hint = str
    ShortText = str
    Text = str
    TailLines = tuple[str, ...]
else:
    StopSignal = Literal[1, 2, 3, 15]  # SIGHUP, SIGINT, SIGQUIT, SIGTERM: what users and schedulers send

    class _MendedType(type):
        """A type of values of the JSON type ``received``, which ``mend`` checks or sanitizes on arrival.

        ``mend`` gets only values of that type; elements of a list are text.
        """

        def __new__(cls, name: str, mend: Callable[[Any], Any], received: type = str) -> _MendedType:
            return super().__new__(cls, name, (), {"mend": staticmethod(mend), "received": received})

        def __init__(cls, *args: object) -> None:
            super().__init__(cls.__name__, (), {})

        def __instancecheck__(cls, value: object) -> bool:
            return True  # msgspec checks only what ``mend`` has returned

    Name = _MendedType("Name", _check_name)
    RunId = _MendedType("RunId", partial(_check_name, in_path=True))
    CommandText = _MendedType("CommandText", partial(_check_name, limit=8192))  # a command line, which nodes compare
    Path = _MendedType("Path", _check_path)  # is opened; printed only through ``errors.sanitize_line``
    TextLine = _MendedType("TextLine", _clean_line)
    Hint = _MendedType("Hint", partial(_clean_lines, limit=2))
    ShortText = _MendedType("ShortText", partial(_clean_lines, limit=4))
    Text = _MendedType("Text", _clean_text)  # many lines
    KernelNumber = _MendedType("KernelNumber", _check_kernel_number, int)  # of the kernel: limits of 2**63 and more
    TailLines = _MendedType("TailLines", _clean_tail, list)

ErrorText = tuple[TextLine, Hint | None]  # of a LaunchError: message and hint


class TaggedMessage(Struct, frozen=True, tag=True, tag_field="op", omit_defaults=True):
    """Base class of messages between processes: each is one JSON object, with the name of its class as ``op``."""


_DECODE_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)

_LOCK = Lock()
"""msgspec analyses a class at its first use, and crashes if two threads do so at once (0.22)."""


def encode(message: object) -> bytes:
    """Return the frame of a message; fields of a ``TaggedMessage`` with their default values are left out."""
    return encode_frame(msgspec.json.encode(message))


def decode(body: bytes, accepted_types: Iterable[type[T]]) -> T:
    """Return the message in ``body``; ProtocolError if it is not of ``accepted_types``, or a field is invalid."""
    try:
        message: T = _decoder((*accepted_types,)).decode(body)
        return message
    except _DECODE_ERRORS as error:
        raise ProtocolError(f"a message that is not expected here ({type(error).__name__})") from None


def parse(data: bytes | str, kind: type[T]) -> T:
    """Parse JSON text as a value of type ``kind``; raise ProtocolError if it is invalid."""
    try:
        value: T = _decoder((kind,)).decode(data)
        return value
    except _DECODE_ERRORS as error:
        raise ProtocolError(f"an invalid value ({type(error).__name__})") from None


def convert(value: Any, kind: type[T]) -> T:
    """Convert lists, dictionaries, strings and numbers to the type ``kind``; ProtocolError if they are invalid."""
    try:
        with _LOCK:
            return msgspec.convert(value, kind, dec_hook=_convert_mended)
    except _DECODE_ERRORS as error:
        raise ProtocolError(f"an invalid value ({type(error).__name__})") from None


def as_dict(value: Struct) -> JsonObject:
    """Return the fields of a ``Struct`` as plain data for JSON, those with default values included."""
    return {name: _as_plain(getattr(value, name)) for name in value.__struct_fields__}


def _as_plain(value: Any) -> JsonValue:
    if isinstance(value, Struct):
        return as_dict(value)
    if isinstance(value, dict):
        return {key: _as_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_plain(each) for each in value]
    plain: JsonValue = value.value if isinstance(value, Enum) else value
    return plain


@cache
def _decoder(kinds: tuple[type, ...]) -> msgspec.json.Decoder[Any]:
    with _LOCK:
        return msgspec.json.Decoder(Union[kinds], dec_hook=_convert_mended)  # noqa: UP007


def _convert_mended(kind: Any, value: Any) -> Any:
    elements = value if type(value) is list else ()
    if type(value) is not kind.received or not all(type(each) is str for each in elements):
        raise TypeError(f"no {kind.__name__}")
    return kind.mend(value)
