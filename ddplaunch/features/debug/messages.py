"""Messages between a rank in its debugger and the user who debugs it; the launcher's debug server relays them.

Input lines are code: they are sent over Unix sockets of this user on one machine, never over the control port.
"""

from __future__ import annotations

from ddplaunch.base.types import Count, Number, Path, TaggedMessage, TextLine

EOF_LINE = "\x04"  # Ctrl-D, as a line of its own
MAX_LINE_CHARS = 64 << 10  # of an input line
MAX_FRAME_BYTES = 8 * MAX_LINE_CHARS  # of a message with such a line, with any characters


class RankStopped(TaggedMessage, frozen=True):
    """The rank is stopped in its debugger at this line; ``error``: the exception that has ended its program there.

    ``tool``: the name of a debugger that uses a pseudo-terminal; input lines are then commands for the launcher.
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
        """Describe the location: "train.py:31, in step"."""
        return f"{self.file}:{self.line}" + (f", in {self.function}" if self.function else "")


class DebuggerOutput(TaggedMessage, frozen=True):
    """Output of the debugger; with a ``prompt``, it waits for a line."""

    rank: Count
    data: bytes
    prompt: TextLine = ""


class Completions(TaggedMessage, frozen=True):
    """Completions of the word that starts at ``begin``."""

    rank: Count
    begin: Count
    words: tuple[TextLine, ...]


class RankResumed(TaggedMessage, frozen=True):
    """The rank runs on; ``is_stepping``: to stop again soon."""

    rank: Count
    is_stepping: bool = False


class QuitRequested(TaggedMessage, frozen=True):
    """The user has quit the debugger of this rank: end the job."""

    rank: Count


class TerminalRequest(TaggedMessage, frozen=True):
    """A debugger in the rank needs a pseudo-terminal; as a reply, the path of one, or "" if none is available."""

    rank: Count
    path: Path = ""


class TerminalOutput(TaggedMessage, frozen=True):
    """Output for the user's terminal, unchanged."""

    rank: Count
    data: bytes


class KeyInput(TaggedMessage, frozen=True):
    """Keys that the user has typed."""

    rank: Count
    data: bytes


class TerminalResized(TaggedMessage, frozen=True):
    """The size of the user's terminal, which shows that of this rank now."""

    rank: Count
    columns: Count
    rows: Count


class LineInput(TaggedMessage, frozen=True):
    """An input line for the debugger."""

    rank: Count
    line: str


class CompletionRequest(TaggedMessage, frozen=True):
    """Request completions of the last word of this line."""

    rank: Count
    line: str


class PauseRank(TaggedMessage, frozen=True):
    """Stop this rank at its next line of Python."""

    rank: Count


class DetachUser(TaggedMessage, frozen=True):
    """No user is attached any more: resume, and ignore breakpoints."""

    rank: Count


class AttachUser(TaggedMessage, frozen=True):
    """A user is attached: stop at breakpoints again."""

    rank: Count


class SessionTakenOver(TaggedMessage, frozen=True):
    """Another user has attached and controls the debugger from now on."""


class DebuggerNotice(TaggedMessage, frozen=True):
    """A message of the launcher to the user; ``is_refusal``: the requested rank cannot be stopped."""

    text: TextLine
    is_refusal: bool = False


FromDebugger = RankStopped | DebuggerOutput | Completions | RankResumed | QuitRequested | TerminalRequest
FromUser = LineInput | CompletionRequest | PauseRank | KeyInput | TerminalResized
ToUser = RankStopped | DebuggerOutput | TerminalOutput | Completions | RankResumed | SessionTakenOver | DebuggerNotice

FROM_DEBUGGER: tuple[type[FromDebugger], ...] = FromDebugger.__args__
FROM_USER: tuple[type[FromUser], ...] = FromUser.__args__
TO_USER: tuple[type[ToUser], ...] = ToUser.__args__
