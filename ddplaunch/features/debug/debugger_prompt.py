"""The debugger prompt of one user: sends lines to one rank or several, and shows their output.

It runs in the launcher, for its own terminal or for a client (``ddplaunch debug``): ``user_terminals.py``.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable

from ddplaunch.base.errors import EXIT_USAGE
from ddplaunch.base.text import format_rank_range, format_ranks
from ddplaunch.base.tty import ENTER, KeyDecoder
from ddplaunch.features.debug import messages
from ddplaunch.features.debug.debug_server import SCROLLBACK_BYTES, DebugServer
from ddplaunch.features.debug.debuggee import Debuggee
from ddplaunch.features.debug.line_editor import LineEditor
from ddplaunch.features.debug.user_terminals import ESCAPE_KEY, LocalTerminal, RemoteTerminal

HELP = (
    "@{0} goes to rank {0}, `@{0} p loss` asks it, `@all p loss` asks all; `detach` lets a rank run, `q` ends the job"
)
WAITING = "no rank is at a breakpoint; waiting for one. Ctrl-C leaves, --rank 0 stops rank 0"

ESCAPE_HELP = "after Ctrl-]: detach, q, @RANK, Enter (back)"

MAX_REPLY_CHARS = 4 << 20  # of a rank, of its output to a line for several ranks
MAX_QUEUED_LINES = 100  # with more, no input is taken until ranks have answered
MAX_RANKS_CHARS = 1000  # of "0,2-3"
STEPS_PER_TURN = 100  # keys or lines that are handled at once: the launcher has other work
TURN_S = 0.001  # until the next ones


class DebuggerPrompt:
    """The prompt of one user for all ranks that are in their debugger."""

    def __init__(
        self,
        server: DebugServer,
        terminal: LocalTerminal | RemoteTerminal,
        guard: Callable[[Callable[..., None]], Callable[..., None]],
        *,
        waits_for_stop: bool = False,
    ) -> None:
        """``guard`` isolates the callbacks; ``waits_for_stop``: ignore the end of the input until a rank stops."""
        self._server, self._terminal, self.guard = server, terminal, guard
        self._waits_for_stop = waits_for_stop
        self._current: int | None = None
        self._keys: deque[str] = deque()
        self._key_decoder = KeyDecoder()
        self._text_decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial_line, self._dropped_chars = "", 0  # of a pipe; what is too long is not kept
        self._input_ended = False
        self._lines: deque[str] = deque()
        self._replies: dict[int, str] | None = None  # while a line to several ranks is answered
        self._awaited: set[int] = set()  # ranks that have not answered it
        self._held_output: dict[int, str] = {}  # of ranks, while another one was selected
        self._has_shown_help = False
        self._lent_to: int | None = None  # the rank whose terminal is shown
        self._has_escaped = False  # the user has left that terminal with Ctrl-]
        self._last_lent_to: int | None = None
        self._is_completing = False  # keys are handled when the completions are there
        self._is_updating = self._turn_is_due = False
        self._editor = LineEditor()

    @property
    def _ranks(self) -> dict[int, Debuggee]:
        return self._server.debuggees_of(self)

    @property
    def _selected_debuggee(self) -> Debuggee | None:
        return None if self._current is None else self._ranks.get(self._current)

    # ----------------------------------------------------------------------------------------------------- of the ranks

    def on_attached(self) -> None:
        ranks = self._ranks
        self._current = min((rank for rank, each in ranks.items() if each.stopped), default=None)
        for rank, each in ranks.items():
            self._announce(rank, each)
        if self._terminal.is_remote and not (self._terminal.is_pipe or self._waits_for_stop or ranks):
            self.show_note(WAITING)
        self._show_help(max(ranks, default=0))
        for rank, each in ranks.items():
            self._on_output(rank, each.output)
        self._update()

    def on_taken_over(self) -> None:
        self._current, self._replies, self._awaited, self._is_completing = None, None, set(), False
        self._held_output.clear()
        if not self._terminal.is_pipe:
            self._keys.clear()
            self._lines.clear()
        self.show_note("another terminal has taken over the debugger")
        self._update()

    def on_message(self, message: messages.FromDebugger) -> None:
        rank, ranks = message.rank, self._ranks
        match message:
            case messages.RankStopped():
                self._waits_for_stop = False
                self._held_output.pop(rank, None)
                if not ranks[rank].is_stepping:
                    self._announce(rank, ranks[rank])
                if self._current is None:
                    self._current = rank
                self._show_help(rank)
            case messages.DebuggerOutput(data=data, prompt=prompt):
                self._on_output(rank, data)
                if prompt:
                    self._on_reply(rank)
            case messages.RankResumed():
                if rank not in ranks:
                    self._held_output.pop(rank, None)
                    if rank == self._current:
                        self._current, self._is_completing = None, False
                        if ranks:
                            self._select_rank(min(ranks.keys() - self._awaited or ranks))
                self._on_reply(rank)
            case messages.Completions(begin=begin, words=words) if self._is_completing:
                self._is_completing = False
                if choices := self._editor.complete(begin, [*words]):
                    self._terminal.show("  ".join(choices) + "\n")
        self._update()

    def _announce(self, rank: int, debuggee: Debuggee) -> None:
        if debuggee.stopped and self._terminal.is_remote:  # the launcher's own terminal shows it in the log
            self._waits_for_stop = False
            failed = f": {debuggee.stopped.error}" if debuggee.stopped.error else ""
            what = "has failed at" if failed else "is at"
            self.show_note(f"rank {rank} {what} {debuggee.stopped.location}{failed}")

    def _show_help(self, rank: int) -> None:
        if len(self._ranks) > 1 and not self._has_shown_help:
            self._has_shown_help = True
            self.show_note(HELP.format(rank))

    def _on_output(self, rank: int, data: bytes) -> None:
        text = data.decode(errors="replace")
        if self._replies is not None and rank in self._awaited:
            reply = self._replies.get(rank, "") + text
            self._replies[rank] = reply if len(reply) <= MAX_REPLY_CHARS else f"…{reply[-MAX_REPLY_CHARS:]}"
        elif rank == self._current:
            self._terminal.show(text)
        elif rank in self._ranks:
            self._held_output[rank] = (self._held_output.get(rank, "") + text)[-SCROLLBACK_BYTES:]

    def _on_reply(self, rank: int) -> None:
        """Called when a rank has answered or runs: show the replies to a line for several ranks once all are there."""
        self._awaited.discard(rank)
        if self._replies is not None and not self._awaited:
            replies, self._replies = self._replies, None
            self._terminal.show(format_replies(replies))

    def on_terminal_output(self, rank: int, data: bytes) -> None:
        if self._lent_to == rank:
            self._terminal.draw(data)

    def show_note(self, text: str) -> None:
        self._terminal.show(f"ddplaunch: {text}\n")

    def refuse(self, text: str) -> None:
        self.show_note(text)
        self._terminal.leave(EXIT_USAGE)

    # ------------------------------------------------------------------------------------------------------ of the user

    def on_input(self, data: bytes) -> None:
        """Handle keys, or the text of a pipe, whose end is b""."""
        if self._lent_to is not None:
            self._on_raw_input(self._lent_to, data)
        elif self._terminal.is_pipe:
            self._read_lines(data)
        elif self._server.has_control(self):
            self._keys.extend(self._key_decoder.decode(data))
        self._update()

    def on_resize(self) -> None:
        """Called when the size of the terminal has changed, or its row is to be drawn again."""
        if not self._turn_is_due:
            self._turn_is_due = True
            self._server.loop.call_later(TURN_S, self.guard(self._on_redraw_timer))

    def _on_redraw_timer(self) -> None:
        self._turn_is_due = False
        if self._lent_to is not None:
            self._server.resize_terminal(self._lent_to, *self._terminal.size)
        self._update()

    def _on_raw_input(self, rank: int, data: bytes) -> None:
        data, escape, more = data.partition(ESCAPE_KEY)
        if data:
            self._server.write_terminal(rank, data)
        if escape:
            self._has_escaped = True
            self._keys.extend(self._key_decoder.decode(more))

    def _read_lines(self, data: bytes) -> None:
        self._input_ended = not data
        *lines, last = self._text_decoder.decode(data, final=not data).split("\n")
        for line in lines:
            self._add_line(self._partial_line + line)
            self._partial_line = ""
        self._partial_line += last
        if self._input_ended and (self._partial_line or self._dropped_chars):
            self._add_line(self._partial_line)
        if len(self._partial_line) > messages.MAX_LINE_CHARS:
            self._dropped_chars += len(self._partial_line)
            self._partial_line = ""

    def _add_line(self, text: str) -> None:
        """Queue a line of input: it is sent when the ranks have answered the lines before."""
        size, self._dropped_chars = self._dropped_chars + len(text), 0
        if size > messages.MAX_LINE_CHARS:  # a cut line would be another statement
            return self.show_note(f"not sent: this line has {size:,} characters, of {messages.MAX_LINE_CHARS:,}")
        self._lines.append(text)

    def _on_key(self, key: str) -> None:
        editor = self._editor
        if key == ENTER:
            self._add_line(editor.take_line())
        elif key == "\t" and (before := editor.text[: editor.cursor]).strip():
            self._is_completing = self._current is not None and self._server.request_completions(self._current, before)
        elif key == messages.EOF_LINE:
            if not editor.text and self._current is not None:
                self._add_line(messages.EOF_LINE)
        elif len(editor.text) <= messages.MAX_LINE_CHARS or not (key.isprintable() or key == "\t"):
            editor.handle_key(key)

    def _update(self) -> None:
        """Handle queued input as far as the ranks are ready for it, and draw the input row."""
        if self._is_updating:  # a line was answered at once
            return
        self._is_updating = True
        self._handle_input()
        self._is_updating = False
        self._draw()
        if not self._keys and len(self._lines) <= MAX_QUEUED_LINES:
            self._terminal.take_input()
        is_idle = not (self._lines or self._awaited) and all(each.prompt for each in self._ranks.values())
        if self._input_ended and is_idle and not self._waits_for_stop:
            self._terminal.leave(0)

    def _handle_input(self) -> None:
        for _ in range(STEPS_PER_TURN):
            if prompt := self._line_prompt():
                text = self._lines.popleft()
                self._terminal.show(f"{prompt}{'^D' if text == messages.EOF_LINE else text}\n")
                self._run_line(text)
            elif self._keys and not self._is_completing:
                self._on_key(self._keys.popleft())
            else:
                break
        else:
            self.on_resize()  # comes back for the keys that are left

    def _line_prompt(self) -> str:
        """Return the prompt of the selected rank if a queued line can be sent to it now; else ""."""
        selected = self._selected_debuggee
        if not self._lines or self._awaited or any(each.is_arriving for each in self._ranks.values()):
            return ""
        return selected.prompt if selected else ""

    def _run_line(self, text: str) -> None:
        assert self._current is not None
        words = text.lstrip()
        match = re.match(r"(all|[\d,\s-]*\d)\s*", words[1:].lstrip()) if words.startswith("@") else None
        if not words and self._ranks[self._current].tool:
            self._has_escaped = False
        elif not match:
            self._send_line(self._current, text)
        elif (chosen := self._parse_ranks(match[1])) is not None:
            if line := match.string[match.end() :]:
                self._replies, self._awaited = {}, {*chosen}
                for rank in chosen:
                    self._send_line(rank, line)
            elif len(chosen) == 1:
                self._select_rank(chosen[0])
            else:
                self.show_note("@all needs a statement, such as @all p loss")

    def _parse_ranks(self, words: str) -> list[int] | None:
        """Parse "all" or "0,2-3"; show an error and return None if one of these ranks is not at its prompt."""
        stopped = [rank for rank, each in self._ranks.items() if each.prompt]
        if words == "all":
            return stopped
        text = re.sub(r"\s", "", words)
        if len(text) > MAX_RANKS_CHARS or not re.fullmatch(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*", text):
            self.show_note(f"@{words[:MAX_RANKS_CHARS]}: expected all, a rank, or ranks like 0,2-3")
            return None
        world_size = self._server.world_size
        most = max(map(int, re.findall(r"\d+", text)))
        if most >= world_size:
            self.show_note(f"there is no rank {most}: this job has {format_rank_range(0, world_size - 1)}")
            return None
        chosen: set[int] = set()
        for part in text.split(","):
            first, _, last = part.partition("-")
            chosen |= {*range(int(first), int(last or first) + 1)}
        if absent := chosen - {*stopped}:
            one, are = min(absent), "is" if len(absent) == 1 else "are"
            hint = f"`ddplaunch debug --rank {one}` stops {'it' if len(absent) == 1 else f'rank {one}'}"
            self.show_note(f"{format_ranks(absent)} {are} not at a breakpoint; {hint}")
            return None
        return sorted(chosen)

    def _send_line(self, rank: int, text: str) -> None:
        self._held_output.pop(rank, None)
        self._server.send_line(rank, text)

    def _select_rank(self, rank: int) -> None:
        self._current, self._has_escaped = rank, False
        if held := self._held_output.pop(rank, ""):
            self._terminal.show(held)

    # ---------------------------------------------------------------------------------------------------- what is shown

    def _draw(self) -> None:
        if not self._show_debugger_terminal():
            each, columns = self._selected_debuggee, self._terminal.size[0]
            prompt = each.prompt if each and columns and not self._awaited else ""
            row = self._editor.render(prompt, columns) if prompt else ""
            self._terminal.show_row(row.encode(errors="replace"), reads_keys=bool(self._ranks))

    def _show_debugger_terminal(self) -> bool:
        """Show the terminal of the selected rank's debugger, if it has one; return whether it is shown."""
        debuggee, rank = self._selected_debuggee, self._current
        if not (debuggee and debuggee.tool) or self._has_escaped or self._awaited or self._terminal.is_pipe:
            rank = None
        if rank == self._lent_to:
            return rank is not None
        if self._lent_to is not None:
            self._terminal.lend(False)
        self._lent_to = rank
        if rank is None or debuggee is None:
            return False
        if rank != self._last_lent_to:
            hint = f"; {ESCAPE_HELP}" if self._last_lent_to is None else ""
            self._last_lent_to = rank
            self.show_note(f"rank {rank} is in {debuggee.tool}{hint}")
        self._terminal.lend(True)
        self._server.resize_terminal(rank, *self._terminal.size)
        if debuggee.terminal:
            self._terminal.draw(debuggee.terminal.scrollback)
        return True


def format_replies(replies: dict[int, str]) -> str:
    """Format the replies of ranks: equal replies once, with the ranks that gave them."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(replies.items()):
        if text:
            groups.setdefault(text.rstrip("\n"), []).append(rank)
    return "".join(
        f"{format_ranks(ranks)}:{chr(10) if chr(10) in text else ' '}{text}\n" for text, ranks in groups.items()
    )
