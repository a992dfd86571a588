"""What a rank in its debugger and the person who debugs say to each other; the launcher passes it on.

A debugger's lines are code: they go over sockets of this user on one machine, and never over the control port.
"""

from __future__ import annotations

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass

if TYPE_CHECKING:
    from ddplaunch.wire.bounds import Count, Line, Number, Path

END_OF_INPUT = "\x04"  # Ctrl-D, as a line of its own
MAX_LINE = 64 << 10  # characters that are typed in one line
MAX_FRAME = 8 * MAX_LINE  # bytes of a message with such a line, whatever its characters


@dataclass(frozen=True)
class Stopped:
    """The rank waits for its debugger at this line; ``error``: its program has ended there by this exception.

    ``tool``: a debugger that has a terminal of its own, where it draws and takes in keys; a line is for the launcher.
    """

    rank: Count
    file: Line
    line: Number
    function: Line
    error: Line = ""
    tool: Line = ""
    world_size: Count = 0  # filled in by the launcher

    @property
    def place(self) -> str:
        """Say where: "train.py:31, in step"."""
        return f"{self.file}:{self.line}" + (f", in {self.function}" if self.function else "")


@dataclass(frozen=True)
class Says:
    """The debugger prints this, and waits for a line where it has a prompt."""

    rank: Count
    data: bytes
    prompt: Line = ""


@dataclass(frozen=True)
class Completed:
    """What the word from ``begin`` on may be."""

    rank: Count
    begin: Count
    words: tuple[Line, ...]


@dataclass(frozen=True)
class GoesOn:
    """The rank runs; ``steps``: it is to stop again soon."""

    rank: Count
    steps: bool = False


@dataclass(frozen=True)
class Quits:
    """The person at this rank wants the job to end."""

    rank: Count


@dataclass(frozen=True)
class Terminal:
    """A debugger in the rank needs one; as the answer, its path, or "" where none is to be had."""

    rank: Count
    path: Path = ""


@dataclass(frozen=True)
class Drawn:
    """This goes to the terminal as it is."""

    rank: Count
    data: bytes


@dataclass(frozen=True)
class Keys:
    """This was typed at the terminal."""

    rank: Count
    data: bytes


@dataclass(frozen=True)
class Sized:
    """The person's terminal is so large, and shows this rank's now."""

    rank: Count
    columns: Count
    rows: Count


@dataclass(frozen=True)
class Typed:
    """A line for the debugger."""

    rank: Count
    line: str


@dataclass(frozen=True)
class Complete:
    """What may the last word of this line be?"""

    rank: Count
    line: str


@dataclass(frozen=True)
class StopRank:
    """Stop this rank at its next line of Python."""

    rank: Count


@dataclass(frozen=True)
class Leave:
    """Nobody is there any more: run on, and stop at no breakpoint."""

    rank: Count


@dataclass(frozen=True)
class Attend:
    """Somebody is there: stop at breakpoints again."""

    rank: Count


@dataclass(frozen=True)
class Elsewhere:
    """Another person is asked from now on."""


@dataclass(frozen=True)
class Remark:
    """The launcher says this to the person; ``refuses``: the rank that was named cannot be stopped."""

    text: Line
    refuses: bool = False


FromDebugger = Stopped | Says | Completed | GoesOn | Quits | Terminal
FromPerson = Typed | Complete | StopRank | Keys | Sized
ToPerson = Stopped | Says | Drawn | Completed | GoesOn | Elsewhere | Remark

FROM_DEBUGGER: tuple[type[FromDebugger], ...] = FromDebugger.__args__
FROM_PERSON: tuple[type[FromPerson], ...] = FromPerson.__args__
TO_PERSON: tuple[type[ToPerson], ...] = ToPerson.__args__
