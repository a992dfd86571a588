"""Line editor with history: takes keys, and renders the line. Pure; it does no input or output."""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch.base.text import display_width
from ddplaunch.base.tty import BACKSPACE

_LEFT, _RIGHT = ("\x1b[D", "\x1bOD", "\x02"), ("\x1b[C", "\x1bOC", "\x06")
_UP, _DOWN = ("\x1b[A", "\x1bOA", "\x10"), ("\x1b[B", "\x1bOB", "\x0e")
_HOME, _END = ("\x1b[H", "\x1bOH", "\x1b[1~", "\x01"), ("\x1b[F", "\x1bOF", "\x1b[4~", "\x05")
_DELETE, _TO_END, _TO_BEGIN, _WORD = ("\x1b[3~",), ("\x0b",), ("\x15",), ("\x17", "\x1b\x7f")

_EDITS: dict[str, Callable[[str, str], tuple[str, str]]] = {
    **dict.fromkeys(_LEFT, lambda before, after: (before[:-1], before[-1:] + after)),
    **dict.fromkeys(_RIGHT, lambda before, after: (before + after[:1], after[1:])),
    **dict.fromkeys(_HOME, lambda before, after: ("", before + after)),
    **dict.fromkeys(_END, lambda before, after: (before + after, "")),
    **dict.fromkeys(_DELETE, lambda before, after: (before, after[1:])),
    **dict.fromkeys(_TO_END, lambda before, after: (before, "")),
    **dict.fromkeys(_TO_BEGIN, lambda before, after: ("", after)),
    **dict.fromkeys(_WORD, lambda before, after: (before.rstrip()[: before.rstrip().rfind(" ") + 1], after)),
    BACKSPACE: lambda before, after: (before[:-1], after),
    "\t": lambda before, after: (before + "    ", after),
}
"""The keys that change the line or move the cursor: functions of the text before and the text after the cursor."""

MAX_HISTORY_LINES = 1000


class LineEditor:
    """The line being edited, and the history of earlier lines."""

    def __init__(self) -> None:
        self.text = ""
        self.cursor = 0
        self._history: list[str] = []
        self._index = 0  # of the history line that is shown; its length: the new line
        self._new_line = ""

    def take_line(self) -> str:
        """Return the line, and start a new one."""
        text = self.text
        if text.strip() and self._history[-1:] != [text]:
            self._history = [*self._history[1 - MAX_HISTORY_LINES :], text]
        self._set_line("")
        self._index, self._new_line = len(self._history), ""
        return text

    def handle_key(self, key: str) -> None:
        """Apply a key; unknown keys do nothing."""
        before, after = self.text[: self.cursor], self.text[self.cursor :]
        if key in _UP or key in _DOWN:
            self._show_history(self._index + (1 if key in _DOWN else -1))
        elif edit := _EDITS.get(key):
            self._set_line(*edit(before, after))
        elif len(key) == 1 and key.isprintable():
            self._set_line(before + key, after)

    def complete(self, begin: int, words: list[str]) -> list[str]:
        """Insert the common prefix of these words at ``begin``; return the words if that adds nothing."""
        if not words or begin > self.cursor:
            return []
        shared = words[0]
        for word in words:
            while not word.startswith(shared):
                shared = shared[:-1]
        if shared.startswith(typed := self.text[begin : self.cursor]) and shared != typed:
            self._set_line(self.text[:begin] + shared, self.text[self.cursor :])
            return []
        return words if len(words) > 1 else []

    def render(self, prompt: str, across: int) -> str:
        """Render prompt and line in ``across`` columns; an escape sequence at the end places the cursor."""
        width = max(8, across - display_width(prompt) - 1)
        first = max(0, self.cursor - width + 1)
        while display_width(self.text[first : self.cursor]) >= width:
            first += 1
        shown = self.text[first : first + width]
        while display_width(shown) > width:
            shown = shown[:-1]
        back = display_width(shown) - display_width(self.text[first : self.cursor])
        return prompt + shown + (f"\x1b[{back}D" if back > 0 else "")

    def _set_line(self, before: str, after: str = "") -> None:
        self.text, self.cursor = before + after, len(before)

    def _show_history(self, at: int) -> None:
        if not 0 <= at <= len(self._history):
            return
        if self._index == len(self._history):
            self._new_line = self.text
        self._index = at
        self._set_line(self._history[at] if at < len(self._history) else self._new_line)
