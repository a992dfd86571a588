"""Tests of output of ranks as a live view shows it."""

from ddplaunch.features.live.live_view import format_last_lines
from ddplaunch.features.live.styled_rows import render_row, wrap_styled_line


def test_a_progress_bar_is_shown_in_its_last_state():
    assert format_last_lines(1, b"begins\n10 %\r20 %\r\n30 %\r40 %") == "[1] begins\n[1] 20 %\n[1] 40 %\n"
    assert format_last_lines(1, b"") == "ddplaunch: rank 1 has no output in memory on this node\n"


def test_a_wrapped_line_keeps_its_style():
    rows = wrap_styled_line("\x1b[1mone two three\x1b[0m", 8)
    assert [render_row(row, False) for row in rows] == ["one two", "three"]
    assert [render_row(row, True) for row in rows] == ["\x1b[1mone two\x1b[0m", "\x1b[1mthree\x1b[0m"]
