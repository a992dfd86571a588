"""Rows of text that are drawn over and over: pieces with a style, cut and flowed to a width in columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ddplaunch.words import columns

GAP = " | "


class StyledText(NamedTuple):
    """A piece of a row."""

    text: str
    style: str = ""  # the parameters of SGR: "1;31"


Row = tuple[StyledText, ...]


def row_width(row: Row) -> int:
    return sum(columns(span.text) for span in row)


def truncate_row(row: Row, limit: int) -> Row:
    """The row, its end left out where it takes more than ``limit`` columns."""
    if row_width(row) <= limit:
        return row
    if limit < 1:
        return ()
    kept: list[StyledText] = []
    left = limit - 1  # for the dots
    for span in row:
        end = 0
        while end < len(span.text) and (takes := columns(span.text[end])) <= left:
            left -= takes
            end += 1
        kept.append(span._replace(text=span.text[:end]))
        if end < len(span.text):
            break
    return (*kept, StyledText("…"))


def flow_parts(parts: Iterable[Row], limit: int, gap: str = GAP) -> list[Row]:
    """Put the parts behind each other, with a gap between two, into as many rows of ``limit`` columns as they need."""
    rows: list[Row] = []
    for part in parts:
        joined = (*rows[-1], StyledText(gap, "2"), *part) if rows else ()
        if rows and row_width(joined) <= limit:
            rows[-1] = joined
        else:
            rows.append(truncate_row(part, limit))
    return rows


def wrap_text(text: str, limit: int, most: int) -> list[Row]:
    """Break a text between words into at most this many rows; the last one is cut where there is more."""
    lines = textwrap.wrap(text, max(1, limit), subsequent_indent="  " if limit > 20 else "")
    if len(lines) > most:
        lines[most - 1 :] = [lines[most - 1] + " …"]
    return [truncate_row((StyledText(line),), limit) for line in lines]


def render_row(row: Row, colour: bool) -> str:
    """The row as a terminal takes it."""
    if not colour:
        return "".join(span.text for span in row)
    return "".join(f"\x1b[{span.style}m{span.text}\x1b[0m" if span.style else span.text for span in row)


def wrap_styled(line: str, limit: int) -> list[Row]:
    """A line with one style at most, from its beginning on, broken between words."""
    style, text = re.match(r"\x1b\[([\d;]*)m", line), re.sub(r"\x1b\[[\d;]*m", "", line)
    parts = textwrap.wrap(text, max(1, limit), subsequent_indent="    " if limit > 20 else "") or [""]
    return [truncate_row((StyledText(part, style[1] if style else ""),), limit) for part in parts]


def strip_styles(rows: Sequence[Row]) -> str:
    """Rows as lines without styles."""
    return "".join(render_row(row, False).rstrip() + "\n" for row in rows)
