"""Tests of the line assembler: the same lines, wherever the bytes are cut."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from ddplaunch.core.output import line_assembler as lines
from ddplaunch.core.output.line_assembler import LineAssembler
from tests.scaled_timeouts import machine_slowness

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
def test_lines_do_not_depend_on_how_reads_are_split(data, expected):
    """Every way of cutting the stream in two, and byte by byte, gives what one read gives."""
    for ends in ([], [*range(1, len(data))], *([cut] for cut in range(len(data)))):
        assert assembled(data, ends) == expected, ends


@pytest.mark.parametrize("data", [b"dos\r\nline\r\n", b"one\r\n"])
def test_carriage_return_newline_is_a_newline(data):
    for cut in range(len(data)):
        assert assembled(data, [cut]).replace(b"\r", b"") == data.replace(b"\r", b"")


def test_the_progress_bar_is_the_last_drawn_line():
    assembler = LineAssembler()
    assert assembler.feed(b"\r 10%") == b""
    assert assembler.progress_bar == b" 10%"
    assembler.feed(b"\r 20%")
    assert assembler.progress_bar == b" 20%"
    assert (assembler.feed(b"\nordinary\n"), assembler.progress_bar) == (b" 20%\nordinary\n", b"")
    assert (assembler.feed(b"dos\r"), assembler.progress_bar) == (b"", b"dos")
    assert (assembler.feed(b"\n"), assembler.progress_bar) == (b"dos\r\n", b"")
    assert assembler.feed(b"\r first 1\r first 2\n\r second 1") == b""
    assert assembler.feed(b"\r second 2") == b" first 2\n", "the bar above is not drawn again"


def test_a_bar_that_is_redrawn_forever_takes_no_memory():
    assembler = LineAssembler()
    for step in range(100_000):
        assert assembler.feed(b"\r%d%%" % step) == b""
    assert len(assembler._rows) == 1


def test_the_upper_of_many_bars_are_emitted():
    """More bars below each other than are ever redrawn: the upper ones are final."""
    assembler = LineAssembler()
    given = b"".join(assembler.feed(b"\rbar %d\n" % bar) for bar in range(100))
    assert given.startswith(b"bar 0\nbar 1\n")
    assert (given + assembler.close()).count(b"\n") == 100


def test_a_line_longer_than_the_longest_passes_in_pieces(monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    assembler = LineAssembler()
    out = b"".join(assembler.feed(b"x" * 60) for _ in itertools.repeat(None, 4)) + assembler.close()
    assert out.replace(b"\n", b"") == b"x" * 240


def test_a_long_row_is_emitted_before_an_escape_sequence_that_a_read_has_split(monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    assembler = LineAssembler()
    assert assembler.feed(b"\r" + b"x" * 11 + b"\x1b") == b"x" * 11 + b"\n"
    assert assembler.feed(b"[1mbold\n") == b"\x1b[1mbold\n"


@pytest.mark.parametrize("start", [b"", b"\r 1%\r 2%"], ids=["plain", "a bar"])
def test_a_stream_without_newlines_takes_a_mebibyte_at_most(start):
    assembler = LineAssembler()
    out, piece = assembler.feed(start), b"x" * (1 << 16)
    for _ in range(100):
        out += assembler.feed(piece)
        assert len(assembler._partial) + sum(map(len, assembler._rows)) <= (1 << 20) + len(piece)
    out += assembler.close()
    assert out.count(b"x") == 100 << 16


PIECES = (b"\r", b"\n", b"\r\n", b"\x1b[A", b"\x1b", b"\x1b[", b"\x1b[31m", b"a", b"line", b"\xff\x00", b"\ra", b"\n\r")


def assembled(data: bytes, ends: list[int]) -> bytes:
    """Return the lines of a stream that is read in pieces with these ends."""
    assembler = LineAssembler()
    pieces = [data[start:end] for start, end in itertools.pairwise([0, *ends, len(data)])]
    return b"".join([*map(assembler.feed, pieces), assembler.close()])


def test_random_streams_do_not_depend_on_how_reads_are_split():
    """A carriage return counts for nothing before a newline, and empty lines at the end for as little."""

    def plain(lines: bytes) -> bytes:
        while b"\r\n" in lines:
            lines = lines.replace(b"\r\n", b"\n")
        return lines.rstrip(b"\n")

    numbers = random.Random(42)
    for _ in range(3000):
        pieces = numbers.sample(PIECES, numbers.randint(2, len(PIECES)))
        data = b"".join(numbers.choices(pieces, k=numbers.randint(1, 16)))
        ends = sorted(numbers.sample(range(len(data) + 1), min(len(data), numbers.randint(1, 5))))
        whole = plain(assembled(data, []))
        assert plain(assembled(data, ends)) == whole, (data, ends)
        assert plain(assembled(data, [*range(1, len(data))])) == whole, data


MIXTURES = {
    "a bar and a line": b"\rbar\nline\n",
    "a bar that is drawn by one byte": b"\r\x1b",
    "two bars": b"\router\n\rinner\x1b[A",
    "controls": bytes(random.Random(1).choices(b"\r\n\x1b[Aab", k=4096)),
    "random bytes": random.Random(2).randbytes(1 << 16),
    "a row without end": b"\r" + b"\x1b" * (1 << 21),
    "bars before plain lines": b"\rbar\nline\n" * 400 + b"step 1 loss 0.1\n" * (1 << 16),
}


@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES)
def test_the_time_is_proportional_to_the_bytes(mixture):
    """At most 2 microseconds a byte, of 0.4 that it takes on a quiet machine, in one read or in many small ones."""
    size = 1 << 18
    data = (mixture * (size // len(mixture) + 1))[:size]
    for step in (size, 4096, 7):
        times = []
        while len(times) < 3 and not (times and times[-1] < 2e-6 * size * machine_slowness()):
            began = time.thread_time()  # of three tries: other processes may fill the caches meanwhile
            assert assembled(data, [*range(step, size, step)])
            times.append(time.thread_time() - began)
        assert min(times) < 2e-6 * size * machine_slowness()
