"""The line assembler alone: cut anywhere, the same lines come out."""

from __future__ import annotations

import itertools

import pytest

from ddplaunch.output import lines
from ddplaunch.output.lines import Lines

NESTED = (  # tqdm within tqdm: down a row, draw, up again
    b"\r outer 0"
    b"\n\r inner 0\x1b[A\n\r inner 1\x1b[A\n\r inner 2\x1b[A"
    b"\r outer 1"
    b"\n\r inner 0\x1b[A\n\r inner 1\x1b[A"
    b"\r outer 2\ndone\n"
)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", b""),
        (b"one\ntwo\n", b"one\ntwo\n"),
        (b"no newline", b"no newline\n"),
        (b"\n\n", b"\n\n"),
        (b"bytes \xff\x00\n", b"bytes \xff\x00\n"),
        (b"\r 1%\r 50%\r100%\nafter\n", b"100%\nafter\n"),
        (b"\r 1%\r 50%", b" 50%\n"),
        (b"text\r 1%\r 2%\n", b" 2%\n"),
        (b"before\n\r 1%\r 2%\nafter\nmore\n", b"before\n 2%\nafter\nmore\n"),
        (b"\r first 1\r first 2\n\r second 1\r second 2\nend\n", b" first 2\n second 2\nend\n"),
        (NESTED, b" outer 2\ndone\n"),
    ],
)
def test_whatever_the_cuts(data, expected):
    """Every way of cutting the stream in two, and byte by byte, gives what one read gives."""
    cuts = [[data], [data[i : i + 1] for i in range(len(data))]]
    cuts += [[data[:i], data[i:]] for i in range(len(data))]
    for pieces in cuts:
        assembler = Lines()
        out = b"".join([*map(assembler.feed, pieces), assembler.close()])
        assert out == expected, pieces


@pytest.mark.parametrize("data", [b"dos\r\nline\r\n", b"one\r\n"])
def test_carriage_return_newline_is_a_newline(data):
    for cut in range(len(data)):
        assembler = Lines()
        out = assembler.feed(data[:cut]) + assembler.feed(data[cut:]) + assembler.close()
        assert out.replace(b"\r", b"") == data.replace(b"\r", b"")


def test_bar_is_what_was_drawn_last():
    assembler = Lines()
    assert assembler.feed(b"\r 10%") == b""
    assert assembler.bar == b" 10%"
    assembler.feed(b"\r 20%")
    assert assembler.bar == b" 20%"
    assert assembler.feed(b"\nordinary\n") == b" 20%\nordinary\n"
    assert assembler.bar == b""


def test_a_bar_drawn_for_ever_takes_no_memory():
    assembler = Lines()
    for step in range(100_000):
        assert assembler.feed(b"\r%d%%" % step) == b""
    assert len(assembler._rows) == 1


def test_bars_without_end_are_given_out(monkeypatch):
    """More bars below each other than are ever redrawn: the upper ones are final."""
    assembler = Lines()
    given = b"".join(assembler.feed(b"\rbar %d\n" % bar) for bar in range(100))
    assert given.startswith(b"bar 0\nbar 1\n")
    assert (given + assembler.close()).count(b"\n") == 100


def test_a_line_longer_than_the_longest_passes_in_pieces(monkeypatch):
    monkeypatch.setattr(lines, "LONGEST", 100)
    assembler = Lines()
    out = b"".join(assembler.feed(b"x" * 60) for _ in itertools.repeat(None, 4)) + assembler.close()
    assert out.replace(b"\n", b"") == b"x" * 240


def test_a_long_row_given_out_keeps_the_order_of_a_cut_movement(monkeypatch):
    monkeypatch.setattr(lines, "LONGEST", 10)
    assembler = Lines()
    assert assembler.feed(b"\r" + b"x" * 11 + b"\x1b") == b"x" * 11 + b"\n"
    assert assembler.feed(b"[1mbold\n") == b"\x1b[1mbold\n"


@pytest.mark.parametrize("start", [b"", b"\r 1%\r 2%"], ids=["plain", "a bar"])
def test_a_stream_without_newlines_takes_a_mebibyte_at_most(start):
    assembler = Lines()
    out, piece = assembler.feed(start), b"x" * (1 << 16)
    for _ in range(100):
        out += assembler.feed(piece)
        assert len(assembler._partial) + sum(map(len, assembler._rows)) <= (1 << 20) + len(piece)
    out += assembler.close()
    assert out.count(b"x") == 100 << 16
