"""Messages of the debugger: between a rank and its launcher, and between the launcher and ``ddplaunch debug``.

A rank gets lines, a user gets bytes to show. Input is code: it is sent over Unix sockets of this user on one machine,
never over the control port.
"""

from __future__ import annotations

from ddplaunch.base.types import Count, ExitCode, Number, Path, TaggedMessage, TextLine

EOF_LINE = "\x04"  # Ctrl-D, as a line of its own
MAX_LINE_CHARS = 64 << 10  # of an input line
MAX_INPUT_BYTES = 16 << 10  # of a ``KeyInput``
MAX_INPUT_FRAME_BYTES = 2 * MAX_INPUT_BYTES  # of a message with it, as JSON


# ---------------------------------------------------------------------------------------------- a rank and its launcher


class RankMessage(TaggedMessage, frozen=True):
    """A message from or to the debugger of a rank."""

    rank: Count


class RankStopped(RankMessage, frozen=True):
    """The rank is stopped in its debugger at this line; ``error``: the exception that has ended its program there.

    ``tool``: the name of a debugger that uses a pseudo-terminal; input lines are then commands for the launcher.
    """

    file: TextLine
    line: Number
    function: TextLine
    error: TextLine = ""
    tool: TextLine = ""

    @property
    def location(self) -> str:
        """Describe the location: "train.py:31, in step"."""
        return f"{self.file}:{self.line}" + (f", in {self.function}" if self.function else "")


class DebuggerOutput(RankMessage, frozen=True):
    """Output of a rank's debugger; with a ``prompt``, the debugger waits for a line of input."""

    data: bytes
    prompt: TextLine = ""


class Completions(RankMessage, frozen=True):
    """The words with which a debugger completes the word that starts at ``begin`` of the input line."""

    begin: Count
    words: tuple[TextLine, ...]


class RankResumed(RankMessage, frozen=True):
    """The rank continues to run; ``is_stepping``: it will stop again soon."""

    is_stepping: bool = False


class QuitRequested(RankMessage, frozen=True):
    """The user has quit the debugger of this rank: end the job."""


class TerminalRequest(RankMessage, frozen=True):
    """Request for a pseudo-terminal for a debugger in the rank; the reply has its path, "" if none is available."""

    path: Path = ""


class LineInput(RankMessage, frozen=True):
    """An input line for the debugger."""

    line: str


class CompletionRequest(RankMessage, frozen=True):
    """Request from a rank's debugger the completions of the last word of a line."""

    line: str


class DetachUser(RankMessage, frozen=True):
    """Message to a rank that no user is attached any more: it resumes, and ignores breakpoints."""


class AttachUser(RankMessage, frozen=True):
    """Message to a rank that a user is attached: it stops at breakpoints again."""


FromDebugger = RankStopped | DebuggerOutput | Completions | RankResumed | QuitRequested | TerminalRequest
FROM_DEBUGGER: tuple[type[FromDebugger], ...] = FromDebugger.__args__


# -------------------------------------------------------------------------------------- the launcher and a debug client


class KeyInput(TaggedMessage, frozen=True):
    """Keys that the user has typed, or text from a pipe; b"": the end of the pipe.

    After it the client waits for ``is_input_taken``.
    """

    data: bytes


class TerminalResized(TaggedMessage, frozen=True):
    """The size of the user's terminal; zeros while the client is in the background."""

    columns: Count
    rows: Count


class UserOutput(TaggedMessage, frozen=True):
    """Bytes for the user's terminal or pipe, unchanged.

    ``is_raw``: from now on no key is a signal; ``is_input_taken``: the client may send more input; ``exit_code``: the
    client exits with it.
    """

    data: bytes = b""
    is_raw: bool = False
    is_input_taken: bool = False
    exit_code: ExitCode | None = None


FromUser = KeyInput | TerminalResized
FROM_USER: tuple[type[FromUser], ...] = FromUser.__args__
