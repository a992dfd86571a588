"""What a rank in its debugger and the person who debugs say to each other; the launcher passes it on.

A debugger's lines are code: they go over sockets of this user on one machine, and never over the control port.
"""

from __future__ import annotations

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass

if TYPE_CHECKING:
    from ddplaunch.wire.bounds import Count, Number, Path, TextLine

EOF_LINE = "\x04"  # Ctrl-D, as a line of its own
MAX_LINE_CHARS = 64 << 10  # characters that are typed in one line
MAX_FRAME_BYTES = 8 * MAX_LINE_CHARS  # bytes of a message with such a line, whatever its characters


@dataclass(frozen=True)
class RankStopped:
    """The rank waits for its debugger at this line; ``error``: its program has ended there by this exception.

    ``tool``: a debugger that has a terminal of its own, where it draws and takes in keys; a line is for the launcher.
    """

    rank: Count
    file: TextLine
    line: Number
    function: TextLine
    error: TextLine = ""
    tool: TextLine = ""
    world_size: Count = 0  # filled in by the launcher

    @property
    def location(self) -> str:
        """Say where: "train.py:31, in step"."""
        return f"{self.file}:{self.line}" + (f", in {self.function}" if self.function else "")


@dataclass(frozen=True)
class DebuggerOutput:
    """The debugger prints this, and waits for a line where it has a prompt."""

    rank: Count
    data: bytes
    prompt: TextLine = ""


@dataclass(frozen=True)
class Completions:
    """What the word from ``begin`` on may be."""

    rank: Count
    begin: Count
    words: tuple[TextLine, ...]


@dataclass(frozen=True)
class RankResumed:
    """The rank runs; ``is_stepping``: it is to stop again soon."""

    rank: Count
    is_stepping: bool = False


@dataclass(frozen=True)
class QuitRequested:
    """The person at this rank wants the job to end."""

    rank: Count


@dataclass(frozen=True)
class TerminalRequest:
    """A debugger in the rank needs one; as the answer, its path, or "" where none is to be had."""

    rank: Count
    path: Path = ""


@dataclass(frozen=True)
class TerminalOutput:
    """This goes to the terminal as it is."""

    rank: Count
    data: bytes


@dataclass(frozen=True)
class KeyInput:
    """This was typed at the terminal."""

    rank: Count
    data: bytes


@dataclass(frozen=True)
class TerminalResized:
    """The person's terminal is so large, and shows this rank's now."""

    rank: Count
    columns: Count
    rows: Count


@dataclass(frozen=True)
class LineInput:
    """A line for the debugger."""

    rank: Count
    line: str


@dataclass(frozen=True)
class CompletionRequest:
    """What may the last word of this line be?"""

    rank: Count
    line: str


@dataclass(frozen=True)
class PauseRank:
    """Stop this rank at its next line of Python."""

    rank: Count


@dataclass(frozen=True)
class DetachUser:
    """Nobody is there any more: run on, and stop at no breakpoint."""

    rank: Count


@dataclass(frozen=True)
class AttachUser:
    """Somebody is there: stop at breakpoints again."""

    rank: Count


@dataclass(frozen=True)
class SessionTakenOver:
    """Another person is asked from now on."""


@dataclass(frozen=True)
class DebugNotice:
    """The launcher says this to the person; ``is_refusal``: the rank that was named cannot be stopped."""

    text: TextLine
    is_refusal: bool = False


FromDebugger = RankStopped | DebuggerOutput | Completions | RankResumed | QuitRequested | TerminalRequest
FromUser = LineInput | CompletionRequest | PauseRank | KeyInput | TerminalResized
ToUser = RankStopped | DebuggerOutput | TerminalOutput | Completions | RankResumed | SessionTakenOver | DebugNotice

FROM_DEBUGGER: tuple[type[FromDebugger], ...] = FromDebugger.__args__
FROM_USER: tuple[type[FromUser], ...] = FromUser.__args__
TO_USER: tuple[type[ToUser], ...] = ToUser.__args__
