"""The debugger prompt: sends the user's lines to one rank or several, and shows their output.

It runs at the launcher's terminal, or at another one (``ddplaunch debug``); a ``DebuggerFrontend`` shows it.
"""

from __future__ import annotations

import os
import re
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.text import describe_all_ranks, format_ranks
from ddplaunch.base.tty import ENTER, Keyboard, in_foreground, window_size
from ddplaunch.core.output.screen import TerminalScreen
from ddplaunch.features.debug.line_editor import LineEditor
from ddplaunch.features.debug.messages import (
    EOF_LINE,
    MAX_LINE_CHARS,
    CompletionRequest,
    Completions,
    DebuggerNotice,
    DebuggerOutput,
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

Draw = Callable[[bytes], None]  # writes to a terminal as it is

HELP = (
    "@{0} goes to rank {0}, `@{0} p loss` asks it, `@all p loss` asks all; `detach` lets a rank run, `q` ends the job"
)

_RESET_TERMINAL = b"\x1b[?1049;1000;1002;1003;1006;2004;1l\x1b[?25;7h\x1b[0m\x1b>\r\x1b[K"
"""Resets what a program may have changed of a terminal: screen, cursor, mouse, paste and keypad."""

ESCAPE_KEY = b"\x1d"
ESCAPE_HELP = "after Ctrl-]: detach, q, @RANK, Enter (back)"


class DebuggerFrontend(Protocol):
    """The terminal of the user."""

    def show(self, text: str) -> None: ...  # complete lines

    def show_input(self, editor: LineEditor, prompt: str, *, expected_soon: bool) -> None:
        """Show the input line; without a prompt there is no input, but it may be ``expected_soon``."""

    def lend_terminal(self, on_input: Callable[[bytes], None], on_resize: Callable[[int, int], None]) -> Draw | None:
        """Give the terminal and all input to a program until ``show_input`` is called; None without a terminal."""


class _DebuggedRank(Struct):
    prompt: str = ""  # "" while it is busy
    has_just_stopped: bool = False  # its prompt follows
    held_output: str = ""  # printed while another rank was selected
    tool: str = ""  # its debugger, which has a terminal of its own
    screen_data: bytes = b""  # the last output to that terminal


class DebuggerPrompt:
    """The prompt of one user for all ranks that are in their debugger."""

    def __init__(self, frontend: DebuggerFrontend, send: Callable[[FromUser], None]) -> None:
        self._frontend, self._send = frontend, send
        self._ranks: dict[int, _DebuggedRank] = {}
        self._current: int | None = None
        self._lines: deque[str] = deque()
        self._replies: dict[int, str] | None = None  # while a line to several ranks is answered
        self._awaited: set[int] = set()  # ranks that have not answered it
        self._has_shown_help = False
        self._world_size = 0
        self._lent_to: int | None = None  # the rank whose terminal is shown
        self._draw_raw: Draw = lambda data: None  # draws there
        self._has_escaped = False  # the user has left that terminal with Ctrl-]
        self._last_lent_to: int | None = None
        self._delayed_keys: deque[str] | None = None  # typed while a completion is awaited
        self.editor = LineEditor()

    @property
    def is_idle(self) -> bool:
        """Whether all input has been answered, and no rank is running to its next stop."""
        return not self._lines and not self._awaited and all(each.prompt for each in self._ranks.values())

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that are in their debugger."""
        return sorted(self._ranks)

    def on_message(self, message: ToUser) -> None:
        match message:
            case RankStopped(rank=rank, tool=tool, world_size=world_size):
                self._world_size = world_size
                before = self._ranks.get(rank)
                self._ranks[rank] = _DebuggedRank(
                    has_just_stopped=True, tool=tool, screen_data=before.screen_data if before else b""
                )
                if self._current is None:
                    self._current = rank
                if len(self._ranks) > 1 and not self._has_shown_help:
                    self._has_shown_help = True
                    self._frontend.show(f"ddplaunch: {HELP.format(rank)}\n")
            case DebuggerOutput(rank=rank, data=data, prompt=prompt) if rank in self._ranks:
                self._on_text(rank, data.decode(errors="replace"))
                if prompt:
                    self._ranks[rank].prompt, self._ranks[rank].has_just_stopped = prompt, False
                    self._on_rank_reply(rank)
            case TerminalOutput(rank=rank, data=data) if rank in self._ranks:
                self._ranks[rank].screen_data = (self._ranks[rank].screen_data + data)[-MAX_LINE_CHARS:]
                return self._draw_raw(data) if self._lent_to == rank else None
            case RankResumed(rank=rank, is_stepping=is_stepping) if rank in self._ranks:
                if is_stepping:
                    self._ranks[rank].prompt = ""
                else:
                    self._remove_rank(rank)
                self._on_rank_reply(rank)
            case Completions(begin=begin, words=words):
                if choices := self.editor.complete(begin, [*words]):
                    self._frontend.show("  ".join(choices) + "\n")
                self._replay_keys()
            case DebuggerNotice(text=text):
                self._frontend.show(f"ddplaunch: {text}\n")
            case SessionTakenOver():
                self._ranks.clear()
                self._current, self._replies, self._awaited, self._delayed_keys = None, None, set(), None
                self._draw()
                self._frontend.show("ddplaunch: another terminal has taken over the debugger\n")
        self._draw()

    def on_key(self, key: str) -> None:
        """Handle a key."""
        if self._delayed_keys is not None:
            return self._delayed_keys.append(key)
        if key == ENTER:
            self.on_line(self.editor.take_line())
        elif key == "\t" and self.editor.text[: self.editor.cursor].strip():
            each = self._ranks.get(-1 if self._current is None else self._current)
            if (
                self._current is not None
                and each
                and each.prompt
                and not each.tool
                and self.editor.cursor <= MAX_LINE_CHARS
            ):
                self._delayed_keys = deque()
                self._send(CompletionRequest(self._current, self.editor.text[: self.editor.cursor]))
        elif key == EOF_LINE:
            if not self.editor.text and self._current is not None:
                self.on_line(EOF_LINE)
        else:
            self.editor.handle_key(key)
        self._draw()

    def on_line(self, text: str) -> None:
        """Queue a line of input: it is sent when the ranks have answered the lines before."""
        if len(text) > MAX_LINE_CHARS:  # a cut line would be another statement
            return self._frontend.show(
                f"ddplaunch: not sent: this line has {len(text):,} characters, of {MAX_LINE_CHARS:,}\n"
            )
        self._lines.append(text)
        self._next_line()

    def _next_line(self) -> None:
        while self._lines and self._current is not None and self._ranks[self._current].prompt:
            if self._awaited or any(each.has_just_stopped for each in self._ranks.values()):
                return
            text = self._lines.popleft()
            self._frontend.show(f"{self._ranks[self._current].prompt}{'^D' if text == EOF_LINE else text}\n")
            self._run_line(text)

    def _run_line(self, text: str) -> None:
        assert self._current is not None
        match = re.fullmatch(r"\s*@\s*(all|[\d,\s-]*\d)\s*(.*)", text)
        if not text.strip() and self._ranks[self._current].tool:
            self._has_escaped = False
        elif not match:
            self._send_line(self._current, text)
        elif (chosen := self._parse_ranks(match[1])) is not None:
            if match[2]:
                self._replies, self._awaited = {}, {*chosen}
                for rank in chosen:
                    self._send_line(rank, match[2])
            elif len(chosen) == 1:
                self._select_rank(chosen[0])
            else:
                self._frontend.show("ddplaunch: @all needs a statement, such as @all p loss\n")

    def _parse_ranks(self, words: str) -> list[int] | None:
        """Parse "all" or "0,2-3"; show an error and return None if one of these ranks is not at its prompt."""
        stopped = [rank for rank, each in sorted(self._ranks.items()) if each.prompt]
        if words == "all":
            return stopped
        chosen: set[int] = set()
        for part in words.replace(" ", "").split(","):
            first, _, last = part.partition("-")
            if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) - int(first) > 1 << 16:
                self._frontend.show(f"ddplaunch: @{words}: expected all, a rank, or ranks like 0,2-3\n")
                return None
            chosen |= {*range(int(first), int(last or first) + 1)}
        if absent := chosen - {*stopped}:
            one, most = min(absent), max(absent)
            if most >= self._world_size > 0:
                text = f"there is no rank {most}: this job has {describe_all_ranks(self._world_size)}"
                self._frontend.show(f"ddplaunch: {text}\n")
                return None
            are = "is" if len(absent) == 1 else "are"
            hint = f"`ddplaunch debug --rank {one}` stops {'it' if len(absent) == 1 else f'rank {one}'}"
            self._frontend.show(f"ddplaunch: {format_ranks(absent)} {are} not at a breakpoint; {hint}\n")
            return None
        return sorted(chosen)

    def _send_line(self, rank: int, text: str) -> None:
        self._ranks[rank] = replace(self._ranks[rank], prompt="", has_just_stopped=False, held_output="")
        self._send(LineInput(rank, text))

    def _select_rank(self, rank: int) -> None:
        self._current, self._has_escaped = rank, False
        held, self._ranks[rank].held_output = self._ranks[rank].held_output, ""
        if held:
            self._frontend.show(held)

    def _on_text(self, rank: int, text: str) -> None:
        if self._replies is not None and rank in self._awaited:
            self._replies[rank] = self._replies.get(rank, "") + text
        elif rank == self._current:
            self._frontend.show(text)
        else:
            self._ranks[rank].held_output += text

    def _on_rank_reply(self, rank: int) -> None:
        """Called when a rank has answered or runs: show the replies to a line for several ranks once all are there."""
        self._awaited.discard(rank)
        if self._replies is not None and not self._awaited:
            replies, self._replies = self._replies, None
            self._frontend.show(group_replies(replies))
        self._next_line()

    def _replay_keys(self) -> None:
        """Handle the keys that were typed while a completion was awaited."""
        keys, self._delayed_keys = self._delayed_keys, None
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
        prompt = "" if self._current is None or self._awaited else self._ranks[self._current].prompt
        self._frontend.show_input(self.editor, prompt, expected_soon=bool(self._ranks))

    def _lend_terminal(self) -> bool:
        """Show the terminal of the selected rank's debugger, if it has one; return whether it is shown."""
        rank = self._current
        each = None if rank is None or self._has_escaped or self._awaited else self._ranks[rank]
        if rank is None or each is None or not each.tool:
            self._lent_to = None
            return False
        if self._lent_to == rank:
            return True
        if rank != self._last_lent_to:
            hint = f"; {ESCAPE_HELP}" if self._last_lent_to is None else ""
            self._last_lent_to = rank
            self._frontend.show(f"ddplaunch: rank {rank} is in {each.tool}{hint}\n")
        draw = self._frontend.lend_terminal(
            partial(self._on_raw_input, rank), lambda *size: self._send(TerminalResized(rank, *size))
        )
        if draw is None:
            return False
        self._lent_to, self._draw_raw = rank, draw
        draw(each.screen_data)
        return True

    def _on_raw_input(self, rank: int, data: bytes) -> None:
        data, escape, more = data.partition(ESCAPE_KEY)
        if data:
            self._send(KeyInput(rank, data))
        if escape:
            self._has_escaped = True
            self._draw()
            for key in more.decode(errors="replace"):
                self.on_key(key)


class TerminalFrontend:
    """Frontend at the launcher's own terminal, below the log; it reads the keys while a rank is at its prompt."""

    def __init__(self, loop: EventLoop, screen: TerminalScreen) -> None:
        self._loop, self._screen = loop, screen
        self._keyboard = Keyboard(loop, lambda key: self.on_key(key))
        self._last: tuple[LineEditor, str, bool] | None = None
        self._on_resize: Callable[[int, int], None] | None = None  # of the program that has the terminal
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

    def lend_terminal(self, on_input: Callable[[bytes], None], on_resize: Callable[[int, int], None]) -> Draw | None:
        self._last, self._on_resize = None, on_resize
        self._screen.show_input_row(b"")
        self._screen.hold_output(True)
        self._keyboard.start(on_input)
        self._restore()
        return self._screen.write_raw

    def _end_lending(self) -> None:
        if self._on_resize is not None:
            self._on_resize = None
            self._keyboard.stop()
            self._screen.write_raw(_RESET_TERMINAL)
            self._screen.hold_output(False)

    def close(self) -> None:
        """Release the terminal."""
        self._end_lending()
        self._last = None
        self._screen.show_input_row(b"")
        self._keyboard.stop()

    def _restore(self) -> None:
        if self._on_resize is not None:
            with suppress(OSError):  # the terminal is gone
                self._on_resize(*os.get_terminal_size(0))
        if self._last is not None:
            editor, prompt, expected_soon = self._last
            self.show_input(editor, prompt, expected_soon=expected_soon)

    def _on_suspend(self) -> None:
        """Called before this process is suspended: the posted callback runs after it is continued."""
        self._screen.show_input_row(b"")
        self._keyboard.stop()
        self._loop.call_soon(self._restore)


def group_replies(replies: dict[int, str]) -> str:
    """Format the replies of ranks; equal replies once, with their ranks."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(replies.items()):
        if text:
            groups.setdefault(text.rstrip("\n"), []).append(rank)
    return "".join(
        f"{format_ranks(ranks)}:{chr(10) if chr(10) in text else ' '}{text}\n" for text, ranks in groups.items()
    )
