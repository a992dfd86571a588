"""Rows of styled text for the live view: truncated, wrapped and rendered to a width in terminal columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ddplaunch.base.text import display_width

GAP = " | "


class StyledText(NamedTuple):
    """A part of a row with one style."""

    text: str
    style: str = ""  # the parameters of SGR: "1;31"


Row = tuple[StyledText, ...]


def row_width(row: Row) -> int:
    return sum(display_width(span.text) for span in row)


def truncate_row(row: Row, limit: int) -> Row:
    """Cut a row to ``limit`` columns."""
    if row_width(row) <= limit:
        return row
    if limit < 1:
        return ()
    kept: list[StyledText] = []
    left = limit - 1  # for the dots
    for span in row:
        end = 0
        while end < len(span.text) and (takes := display_width(span.text[end])) <= left:
            left -= takes
            end += 1
        kept.append(span._replace(text=span.text[:end]))
        if end < len(span.text):
            break
    return (*kept, StyledText("…"))


def wrap_parts(parts: Iterable[Row], limit: int, gap: str = GAP) -> list[Row]:
    """Join parts with gaps into rows of at most ``limit`` columns; a part that does not fit begins a new row."""
    rows: list[Row] = []
    for part in parts:
        joined = (*rows[-1], StyledText(gap, "2"), *part) if rows else ()
        if rows and row_width(joined) <= limit:
            rows[-1] = joined
        else:
            rows.append(truncate_row(part, limit))
    return rows


def wrap_text(text: str, limit: int, most: int) -> list[Row]:
    """Wrap a text into at most ``most`` rows; the last row is cut if there is more text."""
    lines = textwrap.wrap(text, max(1, limit), subsequent_indent="  " if limit > 20 else "")
    if len(lines) > most:
        lines[most - 1 :] = [lines[most - 1] + " …"]
    return [truncate_row((StyledText(line),), limit) for line in lines]


def render_row(row: Row, colour: bool) -> str:
    """Render a row as text, with ANSI styles if ``colour``."""
    if not colour:
        return "".join(span.text for span in row)
    return "".join(f"\x1b[{span.style}m{span.text}\x1b[0m" if span.style else span.text for span in row)


def wrap_styled_line(line: str, limit: int) -> list[Row]:
    """Wrap a line of text with one style: the ANSI style at its beginning, if there is one."""
    style, text = re.match(r"\x1b\[([\d;]*)m", line), re.sub(r"\x1b\[[\d;]*m", "", line)
    parts = textwrap.wrap(text, max(1, limit), subsequent_indent="    " if limit > 20 else "") or [""]
    return [truncate_row((StyledText(part, style[1] if style else ""),), limit) for part in parts]


def render_plain_text(rows: Sequence[Row]) -> str:
    """Render rows as lines of text without styles."""
    return "".join(render_row(row, False).rstrip() + "\n" for row in rows)
