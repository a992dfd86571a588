"""The prompt of a person who debugs ranks: lines to one rank, or to several at once, and what they answer.

At the launcher's terminal, or at another (``ddplaunch debug``); a face shows it.
"""

from __future__ import annotations

import os
import re
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from ddplaunch import TYPE_CHECKING
from ddplaunch.agent.debugger_messages import (
    EOF_LINE,
    MAX_LINE_CHARS,
    CompletionRequest,
    Completions,
    DebuggerOutput,
    DebugNotice,
    FromUser,
    KeyInput,
    LineInput,
    RankResumed,
    RankStopped,
    SessionTakenOver,
    TerminalOutput,
    TerminalResized,
    ToUser,
)
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.live.editor import LineEditor
from ddplaunch.loop import EventLoop
from ddplaunch.output.screen import TerminalScreen
from ddplaunch.output.terminal import ENTER, Keyboard, in_foreground, window_size
from ddplaunch.words import all_ranks
from ddplaunch.words import format_ranks as named

if TYPE_CHECKING:
    from typing import Protocol

    Draw = Callable[[bytes], None]  # writes to a terminal as it is
else:
    Protocol = object

HELP = (
    "@{0} goes to rank {0}, `@{0} p loss` asks it, `@all p loss` asks all; `detach` lets a rank run, `q` ends the job"
)

_RESET_TERMINAL = b"\x1b[?1049;1000;1002;1003;1006;2004;1l\x1b[?25;7h\x1b[0m\x1b>\r\x1b[K"
"""What undoes that a program has changed of a terminal: screen, cursor, mouse, paste and keypad."""

ESCAPE_KEY = b"\x1d"
ESCAPE_HELP = "after Ctrl-]: detach, q, @RANK, Enter (back)"


class DebuggerFrontend(Protocol):
    """Where a person reads and types."""

    def show(self, text: str) -> None: ...  # whole lines

    def show_input(self, editor: LineEditor, prompt: str, *, expected_soon: bool) -> None:
        """Show what is typed; without a prompt, nothing can be, but perhaps ``expected_soon``."""

    def lend_terminal(self, on_input: Callable[[bytes], None], on_resize: Callable[[int, int], None]) -> Draw | None:
        """Give the terminal to a program until ``show_input`` is called: all that is typed is its. None without one."""


@dataclass
class _DebuggedRank:
    asks: str = ""  # its prompt; "" while it is at work
    arrives: bool = False  # it has stopped, and is about to ask
    held: str = ""  # what it has said while the person was at another
    tool: str = ""  # its debugger, which has a terminal of its own
    drawn: bytes = b""  # the last of what is to be seen there


class DebuggerPrompt:
    """What one person sees of all ranks that are in their debugger."""

    def __init__(self, face: DebuggerFrontend, send: Callable[[FromUser], None]) -> None:
        self._face, self._send = face, send
        self._ranks: dict[int, _DebuggedRank] = {}
        self._current: int | None = None
        self._lines: deque[str] = deque()
        self._answers: dict[int, str] | None = None  # while several are asked at once
        self._awaited: set[int] = set()
        self._helped = False
        self._world_size = 0
        self._lent: int | None = None  # the rank whose terminal is shown
        self._screen: Draw = lambda data: None  # draws there
        self._aside = False  # the person has left that for a while
        self._last_lent: int | None = None
        self._keys: deque[str] | None = None  # that came while a word is being completed
        self.editor = LineEditor()

    @property
    def is_idle(self) -> bool:
        """Whether all that was typed has been answered, and no rank is on its way to its next stop."""
        return not self._lines and not self._awaited and all(each.asks for each in self._ranks.values())

    @property
    def ranks(self) -> Sequence[int]:
        """Those that are in their debugger."""
        return sorted(self._ranks)

    def on_message(self, message: ToUser) -> None:
        match message:
            case RankStopped(rank=rank, tool=tool, world_size=world_size):
                self._world_size = world_size
                before = self._ranks.get(rank)
                self._ranks[rank] = _DebuggedRank(arrives=True, tool=tool, drawn=before.drawn if before else b"")
                if self._current is None:
                    self._current = rank
                if len(self._ranks) > 1 and not self._helped:
                    self._helped = True
                    self._face.show(f"ddplaunch: {HELP.format(rank)}\n")
            case DebuggerOutput(rank=rank, data=data, prompt=prompt) if rank in self._ranks:
                self._on_text(rank, data.decode(errors="replace"))
                if prompt:
                    self._ranks[rank].asks, self._ranks[rank].arrives = prompt, False
                    self._on_rank_reply(rank)
            case TerminalOutput(rank=rank, data=data) if rank in self._ranks:
                self._ranks[rank].drawn = (self._ranks[rank].drawn + data)[-MAX_LINE_CHARS:]
                return self._screen(data) if self._lent == rank else None
            case RankResumed(rank=rank, is_stepping=steps) if rank in self._ranks:
                if steps:
                    self._ranks[rank].asks = ""
                else:
                    self._remove_rank(rank)
                self._on_rank_reply(rank)
            case Completions(begin=begin, words=words):
                if several := self.editor.complete(begin, [*words]):
                    self._face.show("  ".join(several) + "\n")
                self._replay_keys()
            case DebugNotice(text=text):
                self._face.show(f"ddplaunch: {text}\n")
            case SessionTakenOver():
                self._ranks.clear()
                self._current, self._answers, self._awaited, self._keys = None, None, set(), None
                self._draw()
                self._face.show("ddplaunch: another terminal has the debugger now\n")
        self._draw()

    def on_key(self, key: str) -> None:
        """Take in a key."""
        if self._keys is not None:
            return self._keys.append(key)
        if key == ENTER:
            self.on_line(self.editor.take_line())
        elif key == "\t" and self.editor.text[: self.editor.cursor].strip():
            each = self._ranks.get(-1 if self._current is None else self._current)
            if (
                self._current is not None
                and each
                and each.asks
                and not each.tool
                and self.editor.cursor <= MAX_LINE_CHARS
            ):
                self._keys = deque()
                self._send(CompletionRequest(self._current, self.editor.text[: self.editor.cursor]))
        elif key == EOF_LINE:
            if not self.editor.text and self._current is not None:
                self.on_line(EOF_LINE)
        else:
            self.editor.handle_key(key)
        self._draw()

    def on_line(self, text: str) -> None:
        """Take in a line: what the ranks at work still have to answer comes first."""
        if len(text) > MAX_LINE_CHARS:  # half of a line would be another program
            return self._face.show(
                f"ddplaunch: not sent: this line has {len(text):,} characters, of {MAX_LINE_CHARS:,}\n"
            )
        self._lines.append(text)
        self._next_line()

    def _next_line(self) -> None:
        while self._lines and self._current is not None and self._ranks[self._current].asks:
            if self._awaited or any(each.arrives for each in self._ranks.values()):
                return
            text = self._lines.popleft()
            self._face.show(f"{self._ranks[self._current].asks}{'^D' if text == EOF_LINE else text}\n")
            self._run_line(text)

    def _run_line(self, text: str) -> None:
        assert self._current is not None
        found = re.fullmatch(r"\s*@\s*(all|[\d,\s-]*\d)\s*(.*)", text)
        if not text.strip() and self._ranks[self._current].tool:
            self._aside = False
        elif not found:
            self._send_line(self._current, text)
        elif (chosen := self._parse_ranks(found[1])) is not None:
            if found[2]:
                self._answers, self._awaited = {}, {*chosen}
                for rank in chosen:
                    self._send_line(rank, found[2])
            elif len(chosen) == 1:
                self._select_rank(chosen[0])
            else:
                self._face.show("ddplaunch: @all takes what to ask: @all p loss\n")

    def _parse_ranks(self, words: str) -> list[int] | None:
        """The ranks that "all" or "0,2-3" names; None, and why, where one is not there to be asked."""
        there = [rank for rank, each in sorted(self._ranks.items()) if each.asks]
        if words == "all":
            return there
        chosen: set[int] = set()
        for part in words.replace(" ", "").split(","):
            first, _, last = part.partition("-")
            if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) - int(first) > 1 << 16:
                self._face.show(f"ddplaunch: @{words}: expected all, a rank, or ranks like 0,2-3\n")
                return None
            chosen |= {*range(int(first), int(last or first) + 1)}
        if absent := chosen - {*there}:
            one, most = min(absent), max(absent)
            if most >= self._world_size > 0:
                text = f"there is no rank {most}: this job has {all_ranks(self._world_size)}"
                self._face.show(f"ddplaunch: {text}\n")
                return None
            are = "is" if len(absent) == 1 else "are"
            hint = f"`ddplaunch debug --rank {one}` stops {'it' if len(absent) == 1 else f'rank {one}'}"
            self._face.show(f"ddplaunch: {named(absent)} {are} not at a breakpoint; {hint}\n")
            return None
        return sorted(chosen)

    def _send_line(self, rank: int, text: str) -> None:
        self._ranks[rank] = replace(self._ranks[rank], asks="", arrives=False, held="")
        self._send(LineInput(rank, text))

    def _select_rank(self, rank: int) -> None:
        self._current, self._aside = rank, False
        held, self._ranks[rank].held = self._ranks[rank].held, ""
        if held:
            self._face.show(held)

    def _on_text(self, rank: int, text: str) -> None:
        if self._answers is not None and rank in self._awaited:
            self._answers[rank] = self._answers.get(rank, "") + text
        elif rank == self._current:
            self._face.show(text)
        else:
            self._ranks[rank].held += text

    def _on_rank_reply(self, rank: int) -> None:
        """A rank has answered, or runs: show what several have said once it is complete, and go on."""
        self._awaited.discard(rank)
        if self._answers is not None and not self._awaited:
            answers, self._answers = self._answers, None
            self._face.show(group_replies(answers))
        self._next_line()

    def _replay_keys(self) -> None:
        """Take in the keys that came while a word was completed."""
        keys, self._keys = self._keys, None
        for key in keys or ():
            self.on_key(key)

    def _remove_rank(self, rank: int) -> None:
        del self._ranks[rank]
        if self._current == rank:
            self._current = None
            self._replay_keys()
            if self._ranks:
                self._select_rank(min(self._ranks.keys() - self._awaited or self._ranks))

    def _draw(self) -> None:
        if self._lend_terminal():
            return
        prompt = "" if self._current is None or self._awaited else self._ranks[self._current].asks
        self._face.show_input(self.editor, prompt, expected_soon=bool(self._ranks))

    def _lend_terminal(self) -> bool:
        """Show the terminal of the rank that the person is at, if it has one; whether it is shown."""
        rank = self._current
        each = None if rank is None or self._aside or self._awaited else self._ranks[rank]
        if rank is None or each is None or not each.tool:
            self._lent = None
            return False
        if self._lent == rank:
            return True
        if rank != self._last_lent:
            away = f"; {ESCAPE_HELP}" if self._last_lent is None else ""
            self._last_lent = rank
            self._face.show(f"ddplaunch: rank {rank} is in {each.tool}{away}\n")
        screen = self._face.lend_terminal(
            partial(self._on_raw_input, rank), lambda *size: self._send(TerminalResized(rank, *size))
        )
        if screen is None:
            return False
        self._lent, self._screen = rank, screen
        screen(each.drawn)
        return True

    def _on_raw_input(self, rank: int, data: bytes) -> None:
        data, away, more = data.partition(ESCAPE_KEY)
        if data:
            self._send(KeyInput(rank, data))
        if away:
            self._aside = True
            self._draw()
            for key in more.decode(errors="replace"):
                self.on_key(key)


class TerminalFrontend:
    """The face of a person at our terminal, below what else is shown there; it has the keys while a rank asks."""

    def __init__(self, loop: EventLoop, screen: TerminalScreen) -> None:
        self._loop, self._screen = loop, screen
        self._keyboard = Keyboard(loop, lambda key: self.on_key(key))
        self._last: tuple[LineEditor, str, bool] | None = None
        self._sized: Callable[[int, int], None] | None = None  # of a program that the terminal is lent to
        self.on_key: Callable[[str], None] = lambda key: None
        loop.add_signal_handlers([signal.SIGWINCH, signal.SIGCONT], lambda number: self._restore())
        loop.add_signal_handlers([signal.SIGTSTP], lambda number: self._on_suspend())

    def show(self, text: str) -> None:
        self._screen.print_text(text)

    def show_input(self, editor: LineEditor, prompt: str, *, expected_soon: bool) -> None:
        self._end_lending()
        if self._last is None and not expected_soon:
            return
        self._last = (editor, prompt, expected_soon) if expected_soon else None
        if expected_soon:
            self._keyboard.start()
        across, _ = window_size(2 if os.isatty(2) else 1)
        shown = editor.render(prompt, across) if prompt and in_foreground(0) else ""
        self._screen.show_input_row(shown.encode(errors="replace"))
        if not expected_soon:
            self._keyboard.stop()

    def lend_terminal(self, typed: Callable[[bytes], None], sized: Callable[[int, int], None]) -> Draw | None:
        self._last, self._sized = None, sized
        self._screen.show_input_row(b"")
        self._screen.set_held(True)
        self._keyboard.start(typed)
        self._restore()
        return self._screen.write_raw

    def _end_lending(self) -> None:
        if self._sized is not None:
            self._sized = None
            self._keyboard.stop()
            self._screen.write_raw(_RESET_TERMINAL)
            self._screen.set_held(False)

    def close(self) -> None:
        """Give the terminal back."""
        self._end_lending()
        self._last = None
        self._screen.show_input_row(b"")
        self._keyboard.stop()

    def _restore(self) -> None:
        if self._sized is not None:
            with suppress(OSError):  # it has gone
                self._sized(*os.get_terminal_size(0))
        if self._last is not None:
            editor, prompt, soon = self._last
            self.show_input(editor, prompt, expected_soon=soon)

    def _on_suspend(self) -> None:
        """We are about to be stopped: what is posted comes when we go on."""
        self._screen.show_input_row(b"")
        self._keyboard.stop()
        self._loop.call_soon(self._restore)


def group_replies(answers: dict[int, str]) -> str:
    """What ranks have answered; equal answers once, with their ranks."""
    alike: dict[str, list[int]] = {}
    for rank, text in sorted(answers.items()):
        if text:
            alike.setdefault(text.rstrip("\n"), []).append(rank)
    told = ""
    for text, numbers in alike.items():
        told += f"{named(numbers)}:{chr(10) if chr(10) in text else ' '}{text}\n"
    return told
