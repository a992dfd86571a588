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
    END_OF_INPUT,
    MAX_LINE,
    Complete,
    Completed,
    Drawn,
    Elsewhere,
    FromPerson,
    GoesOn,
    Keys,
    Remark,
    Says,
    Sized,
    Stopped,
    ToPerson,
    Typed,
)
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.live.editor import Editor
from ddplaunch.loop import Loop
from ddplaunch.output.screen import Terminal
from ddplaunch.output.terminal import ENTER, Keyboard, in_foreground, window
from ddplaunch.words import all_ranks
from ddplaunch.words import ranks as named

if TYPE_CHECKING:
    from typing import Protocol

    Draw = Callable[[bytes], None]  # writes to a terminal as it is
else:
    Protocol = object

HELP = (
    "@{0} goes to rank {0}, `@{0} p loss` asks it, `@all p loss` asks all; `detach` lets a rank run, `q` ends the job"
)

_AS_USUAL = b"\x1b[?1049;1000;1002;1003;1006;2004;1l\x1b[?25;7h\x1b[0m\x1b>\r\x1b[K"
"""What undoes that a program has changed of a terminal: screen, cursor, mouse, paste and keypad."""

AWAY_KEY = b"\x1d"
AWAY = "after Ctrl-]: detach, q, @RANK, Enter (back)"


class Face(Protocol):
    """Where a person reads and types."""

    def show(self, text: str) -> None: ...  # whole lines

    def row(self, editor: Editor, prompt: str, *, soon: bool) -> None:
        """Show what is typed; without a prompt, nothing can be, but perhaps ``soon``."""

    def lend(self, typed: Callable[[bytes], None], sized: Callable[[int, int], None]) -> Draw | None:
        """Give the terminal to a program until ``row`` is called: all that is typed is its. None without one."""


@dataclass
class _Debugged:
    asks: str = ""  # its prompt; "" while it is at work
    arrives: bool = False  # it has stopped, and is about to ask
    held: str = ""  # what it has said while the person was at another
    tool: str = ""  # its debugger, which has a terminal of its own
    drawn: bytes = b""  # the last of what is to be seen there


class Prompt:
    """What one person sees of all ranks that are in their debugger."""

    def __init__(self, face: Face, send: Callable[[FromPerson], None]) -> None:
        self._face, self._send = face, send
        self._ranks: dict[int, _Debugged] = {}
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
        self.editor = Editor()

    @property
    def idle(self) -> bool:
        """Whether all that was typed has been answered, and no rank is on its way to its next stop."""
        return not self._lines and not self._awaited and all(each.asks for each in self._ranks.values())

    @property
    def ranks(self) -> Sequence[int]:
        """Those that are in their debugger."""
        return sorted(self._ranks)

    def hear(self, message: ToPerson) -> None:
        match message:
            case Stopped(rank=rank, tool=tool, world_size=world_size):
                self._world_size = world_size
                before = self._ranks.get(rank)
                self._ranks[rank] = _Debugged(arrives=True, tool=tool, drawn=before.drawn if before else b"")
                if self._current is None:
                    self._current = rank
                if len(self._ranks) > 1 and not self._helped:
                    self._helped = True
                    self._face.show(f"ddplaunch: {HELP.format(rank)}\n")
            case Says(rank=rank, data=data, prompt=prompt) if rank in self._ranks:
                self._hear_text(rank, data.decode(errors="replace"))
                if prompt:
                    self._ranks[rank].asks, self._ranks[rank].arrives = prompt, False
                    self._answered(rank)
            case Drawn(rank=rank, data=data) if rank in self._ranks:
                self._ranks[rank].drawn = (self._ranks[rank].drawn + data)[-MAX_LINE:]
                return self._screen(data) if self._lent == rank else None
            case GoesOn(rank=rank, steps=steps) if rank in self._ranks:
                if steps:
                    self._ranks[rank].asks = ""
                else:
                    self._part(rank)
                self._answered(rank)
            case Completed(begin=begin, words=words):
                if several := self.editor.complete(begin, [*words]):
                    self._face.show("  ".join(several) + "\n")
                self._catch_up()
            case Remark(text=text):
                self._face.show(f"ddplaunch: {text}\n")
            case Elsewhere():
                self._ranks.clear()
                self._current, self._answers, self._awaited, self._keys = None, None, set(), None
                self._draw()
                self._face.show("ddplaunch: another terminal has the debugger now\n")
        self._draw()

    def key(self, key: str) -> None:
        """Take in a key."""
        if self._keys is not None:
            return self._keys.append(key)
        if key == ENTER:
            self.line(self.editor.take())
        elif key == "\t" and self.editor.text[: self.editor.cursor].strip():
            each = self._ranks.get(-1 if self._current is None else self._current)
            if self._current is not None and each and each.asks and not each.tool and self.editor.cursor <= MAX_LINE:
                self._keys = deque()
                self._send(Complete(self._current, self.editor.text[: self.editor.cursor]))
        elif key == END_OF_INPUT:
            if not self.editor.text and self._current is not None:
                self.line(END_OF_INPUT)
        else:
            self.editor.key(key)
        self._draw()

    def line(self, text: str) -> None:
        """Take in a line: what the ranks at work still have to answer comes first."""
        if len(text) > MAX_LINE:  # half of a line would be another program
            return self._face.show(f"ddplaunch: not sent: this line has {len(text):,} characters, of {MAX_LINE:,}\n")
        self._lines.append(text)
        self._go_on()

    def _go_on(self) -> None:
        while self._lines and self._current is not None and self._ranks[self._current].asks:
            if self._awaited or any(each.arrives for each in self._ranks.values()):
                return
            text = self._lines.popleft()
            self._face.show(f"{self._ranks[self._current].asks}{'^D' if text == END_OF_INPUT else text}\n")
            self._do(text)

    def _do(self, text: str) -> None:
        assert self._current is not None
        found = re.fullmatch(r"\s*@\s*(all|[\d,\s-]*\d)\s*(.*)", text)
        if not text.strip() and self._ranks[self._current].tool:
            self._aside = False
        elif not found:
            self._ask(self._current, text)
        elif (chosen := self._chosen(found[1])) is not None:
            if found[2]:
                self._answers, self._awaited = {}, {*chosen}
                for rank in chosen:
                    self._ask(rank, found[2])
            elif len(chosen) == 1:
                self._go_to(chosen[0])
            else:
                self._face.show("ddplaunch: @all takes what to ask: @all p loss\n")

    def _chosen(self, words: str) -> list[int] | None:
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

    def _ask(self, rank: int, text: str) -> None:
        self._ranks[rank] = replace(self._ranks[rank], asks="", arrives=False, held="")
        self._send(Typed(rank, text))

    def _go_to(self, rank: int) -> None:
        self._current, self._aside = rank, False
        held, self._ranks[rank].held = self._ranks[rank].held, ""
        if held:
            self._face.show(held)

    def _hear_text(self, rank: int, text: str) -> None:
        if self._answers is not None and rank in self._awaited:
            self._answers[rank] = self._answers.get(rank, "") + text
        elif rank == self._current:
            self._face.show(text)
        else:
            self._ranks[rank].held += text

    def _answered(self, rank: int) -> None:
        """A rank has answered, or runs: show what several have said once it is complete, and go on."""
        self._awaited.discard(rank)
        if self._answers is not None and not self._awaited:
            answers, self._answers = self._answers, None
            self._face.show(grouped(answers))
        self._go_on()

    def _catch_up(self) -> None:
        """Take in the keys that came while a word was completed."""
        keys, self._keys = self._keys, None
        for key in keys or ():
            self.key(key)

    def _part(self, rank: int) -> None:
        del self._ranks[rank]
        if self._current == rank:
            self._current = None
            self._catch_up()
            if self._ranks:
                self._go_to(min(self._ranks.keys() - self._awaited or self._ranks))

    def _draw(self) -> None:
        if self._lend():
            return
        prompt = "" if self._current is None or self._awaited else self._ranks[self._current].asks
        self._face.row(self.editor, prompt, soon=bool(self._ranks))

    def _lend(self) -> bool:
        """Show the terminal of the rank that the person is at, if it has one; whether it is shown."""
        rank = self._current
        each = None if rank is None or self._aside or self._awaited else self._ranks[rank]
        if rank is None or each is None or not each.tool:
            self._lent = None
            return False
        if self._lent == rank:
            return True
        if rank != self._last_lent:
            away = f"; {AWAY}" if self._last_lent is None else ""
            self._last_lent = rank
            self._face.show(f"ddplaunch: rank {rank} is in {each.tool}{away}\n")
        screen = self._face.lend(partial(self._typed, rank), lambda *size: self._send(Sized(rank, *size)))
        if screen is None:
            return False
        self._lent, self._screen = rank, screen
        screen(each.drawn)
        return True

    def _typed(self, rank: int, data: bytes) -> None:
        data, away, more = data.partition(AWAY_KEY)
        if data:
            self._send(Keys(rank, data))
        if away:
            self._aside = True
            self._draw()
            for key in more.decode(errors="replace"):
                self.key(key)


class AtTerminal:
    """The face of a person at our terminal, below what else is shown there; it has the keys while a rank asks."""

    def __init__(self, loop: Loop, screen: Terminal) -> None:
        self._loop, self._screen = loop, screen
        self._keyboard = Keyboard(loop, lambda key: self.heard(key))
        self._last: tuple[Editor, str, bool] | None = None
        self._sized: Callable[[int, int], None] | None = None  # of a program that the terminal is lent to
        self.heard: Callable[[str], None] = lambda key: None
        loop.catch([signal.SIGWINCH, signal.SIGCONT], lambda number: self._again())
        loop.catch([signal.SIGTSTP], lambda number: self._pause())

    def show(self, text: str) -> None:
        self._screen.page(text)

    def row(self, editor: Editor, prompt: str, *, soon: bool) -> None:
        self._end_lending()
        if self._last is None and not soon:
            return
        self._last = (editor, prompt, soon) if soon else None
        if soon:
            self._keyboard.begin()
        across, _ = window(2 if os.isatty(2) else 1)
        shown = editor.row(prompt, across) if prompt and in_foreground(0) else ""
        self._screen.type_row(shown.encode(errors="replace"))
        if not soon:
            self._keyboard.end()

    def lend(self, typed: Callable[[bytes], None], sized: Callable[[int, int], None]) -> Draw | None:
        self._last, self._sized = None, sized
        self._screen.type_row(b"")
        self._screen.hold(True)
        self._keyboard.begin(typed)
        self._again()
        return self._screen.draw

    def _end_lending(self) -> None:
        if self._sized is not None:
            self._sized = None
            self._keyboard.end()
            self._screen.draw(_AS_USUAL)
            self._screen.hold(False)

    def close(self) -> None:
        """Give the terminal back."""
        self._end_lending()
        self._last = None
        self._screen.type_row(b"")
        self._keyboard.end()

    def _again(self) -> None:
        if self._sized is not None:
            with suppress(OSError):  # it has gone
                self._sized(*os.get_terminal_size(0))
        if self._last is not None:
            editor, prompt, soon = self._last
            self.row(editor, prompt, soon=soon)

    def _pause(self) -> None:
        """We are about to be stopped: what is posted comes when we go on."""
        self._screen.type_row(b"")
        self._keyboard.end()
        self._loop.soon(self._again)


def grouped(answers: dict[int, str]) -> str:
    """What ranks have answered; equal answers once, with their ranks."""
    alike: dict[str, list[int]] = {}
    for rank, text in sorted(answers.items()):
        if text:
            alike.setdefault(text.rstrip("\n"), []).append(rank)
    told = ""
    for text, numbers in alike.items():
        told += f"{named(numbers)}:{chr(10) if chr(10) in text else ' '}{text}\n"
    return told
