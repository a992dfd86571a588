"""Tests of merging equal lines of several ranks: shown once, none lost, and in each rank's order."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from pathlib import Path

import pytest

from ddplaunch.core.output.line_merger import HOLD_S, LineMerger
from ddplaunch.core.prefix import format_for_ranks, uses_rank_only
from tests.conftest import ddplaunch_command, run_command, write_program
from tests.constant_override import launcher_with_constant
from tests.start_modes import LIGHT

Printed = dict[int, list[tuple[int, bytes, float]]]

TRACEBACK = b"Traceback (most recent call last):"
WORDS = (b"a", b"b", b"c", b"", b"  below", TRACEBACK, b"loss %d")


def play(seed: int, most: int = 1000) -> tuple[Printed, Printed, list[tuple[tuple[int, ...], bytes]]]:
    """Print at random; return what each rank printed and when, what was given of it and when, and all that was."""
    chance = random.Random(seed)
    count = chance.choice([2, 3, 8])
    equal, now = LineMerger(most), 0.0
    printed: Printed = defaultdict(list)
    given: Printed = defaultdict(list)
    groups: list[tuple[tuple[int, ...], bytes]] = []

    def take() -> None:
        for ranks, number, lines in equal.take_output():
            assert len({*ranks}) == len(ranks)
            groups.append((ranks, lines))
            for rank in ranks:
                given[rank] += [(number, line, now) for line in lines[:-1].split(b"\n")]

    for rank in range(count):
        equal.add(rank, 1, b"", now)
        equal.add(rank, 2, b"", now)
    for _ in range(chance.randrange(200)):
        later = now + chance.choice([0.0, 0.001, 0.05, 0.3])
        while equal.next_flush_time is not None and equal.next_flush_time <= later:
            now = equal.next_flush_time  # as a timer does
            equal.flush_until(now - HOLD_S + 1e-9)
            take()
        now = later
        rank, number = chance.randrange(count), chance.choice([1, 1, 2])
        lines = [chance.choice(WORDS) for _ in range(chance.choice([1, 1, 3, 20]))]
        lines = [line % rank if b"%" in line else line for line in lines]
        printed[rank] += [(number, line, now) for line in lines]
        equal.add(rank, number, b"".join(line + b"\n" for line in lines), now)
        if chance.random() < 0.05:
            equal.flush_rank(rank)
            assert not equal.held_count(rank)
        take()
        assert sum(map(equal.held_count, range(count))) <= 2 * most
    for rank in range(count):
        equal.close_stream(rank, 1)
        equal.close_stream(rank, 2)
    take()
    assert equal.next_flush_time is None, "nothing is held when no rank can print"
    return printed, given, groups


@pytest.mark.parametrize("most", [1000, 20])
def test_nothing_is_lost_reordered_or_late(most):
    merged = 0
    for seed in range(75):
        printed, given, groups = play(seed, most)
        for rank, lines in printed.items():
            assert [line[:2] for line in lines] == [line[:2] for line in given[rank]], (seed, rank)
            late = [after - before for (*_, before), (*_, after) in zip(lines, given[rank], strict=True)]
            assert max(late) <= HOLD_S + 1e-9, (seed, rank)
        merged += sum(len(ranks) > 1 for ranks, _ in groups)
    assert merged > 100


def given(*printed: tuple[float, int, bytes], ranks: int = 2) -> list[tuple[tuple[int, ...], bytes]]:
    """The merged output, at the end."""
    equal = LineMerger()
    for rank in range(ranks):
        equal.add(rank, 1, b"", 0.0)
    for now, rank, lines in printed:
        equal.add(rank, 1, lines, now)
    equal.flush_until(math.inf)
    return [(ranks, lines) for ranks, _, lines in equal.take_output()]


def test_equal_lines_are_merged_after_different_ones():
    both = [(0.0, 0, b"start\nis 0\nand so on\nend\n"), (0.1, 1, b"start\nis 1\nend\n")]
    assert given(*both) == [
        ((0, 1), b"start\n"), ((0,), b"is 0\nand so on\n"), ((1,), b"is 1\n"), ((0, 1), b"end\n"),
    ]  # fmt: skip


def test_equal_lines_at_different_times_are_not_merged():
    for later in (HOLD_S, HOLD_S + 0.01):
        assert given((0.0, 0, b"step\n"), (later, 1, b"step\n")) == [((0,), b"step\n"), ((1,), b"step\n")]
    assert given((0.0, 0, b"step\n"), (0.19, 1, b"step\n")) == [((0, 1), b"step\n")]


def test_a_line_printed_by_all_ranks_is_not_held():
    equal = LineMerger()
    for rank in (0, 1):
        equal.add(rank, 1, b"", 0.0)
    equal.add(0, 1, b"only 0\nboth\n", 0.0)
    assert not equal.take_output()
    equal.add(1, 1, b"both\nonly 1\n", 0.0)
    assert [(ranks, lines) for ranks, _, lines in equal.take_output()] == [((0,), b"only 0\n"), ((0, 1), b"both\n")]
    assert equal.next_flush_time == HOLD_S
    equal.close_stream(0, 1)
    assert not equal.take_output(), "rank 1 may print more"
    equal.close_stream(1, 1)
    assert [(ranks, lines) for ranks, _, lines in equal.take_output()] == [((1,), b"only 1\n")]


def test_no_line_is_held_while_many_are_printed():
    equal, held = LineMerger(3), []
    for rank in (0, 1):
        equal.add(rank, 1, b"", 10.0)
    for now, lines in ((10.0, b"a\n" * 4), (10.1, b"b\n"), (10.25, b"c\n"), (20.0, b"d\n"), (20.1, b"x" * 999 + b"\n")):
        equal.add(0, 1, lines, now)
        held.append(not equal.take_output())
    assert held == [False, False, False, True, False], "until the hold is over, and then for as long again"


def test_lines_of_a_single_rank_are_not_held():
    equal = LineMerger()
    equal.add(3, 1, b"", 0.0)
    equal.add(3, 1, b"one\n", 0.0)
    assert [ranks for ranks, *_ in equal.take_output()] == [(3,)]


def test_tracebacks_are_not_mixed():
    head = TRACEBACK + b"\n"
    frames = [b'  File "train.py", line %d, in main\n    go()\n' % line for line in (1, 2)]
    pieces = [head, head, frames[0], frames[1], b"ValueError\n", b"ValueError\n"]
    printed = [(0.01 * place, place % 2, piece) for place, piece in enumerate(pieces)]
    assert given(*printed) == [((0,), head + frames[0]), ((1,), head + frames[1]), ((0, 1), b"ValueError\n")]
    alike = [(0.0, rank, head + frames[0] + b"ValueError: %d\n" % rank) for rank in (0, 1)]
    assert given(*alike) == [((0, 1), head + frames[0]), ((0,), b"ValueError: 0\n"), ((1,), b"ValueError: 1\n")]


def test_which_prefixes_can_name_several_ranks():
    assert [uses_rank_only(each) for each in ("[{rank}]", "{rank}/{rank}:", "none", "{rank} {host}")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert format_for_ranks("[{rank}]", (0, 3, 4, 5)) == "[0,3-5]"
    assert format_for_ranks("rank {rank}:", range(8)) == "rank 0-7:"


SPEAKS = """
import fcntl, os, sys, termios, time
rank = int(os.environ["RANK"])
print("loading checkpoint", flush=True)
print("loss", rank, flush=True)
print("a warning", file=sys.stderr, flush=True)
while any(any(fcntl.ioctl(fd, termios.FIONREAD, bytes(4))) for fd in (1, 2)):
    time.sleep(0.01)  # until the launcher has read all
open(f"printed-{rank}", "w").close()
while not all(os.path.exists(f"printed-{each}") for each in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.01)  # lines of a rank are not held after its end
"""


@pytest.fixture
def slow_flush(tmp_path) -> Path:
    """A launcher that holds lines for a minute, however slow this machine is, beside SPEAKS."""
    write_program(tmp_path, "train.py", SPEAKS)
    return launcher_with_constant(tmp_path, "core.output.line_merger.HOLD_S", 60.0)


@pytest.mark.parametrize(
    ("words", "alike", "own"),
    [
        ((), ["[0]", "[1]", "[2]"], ["[0]", "[1]", "[2]"]),
        (("--merge",), ["[0-2]"], ["[0]  ", "[1]  ", "[2]  "]),
        (("--merge", "--prefix", "r{rank}:"), ["r0-2:"], ["r0:  ", "r1:  ", "r2:  "]),
        (("--merge", "--show", "1"), ["[1]"], ["[1]"]),
    ],
)
def test_lines_are_merged_in_a_pipe_only_on_request(slow_flush, tmp_path, words, alike, own):
    typed = ddplaunch_command("run", *LIGHT, "--nproc", "3", *words, "--log-dir", "logs", "train.py")
    done = run_command([slow_flush, *typed[1:]], tmp_path, timeout=90)
    lines = done.stdout.splitlines()
    assert sorted(line for line in lines if "load" in line) == [f"{each} loading checkpoint" for each in alike]
    numbers = ["1"] if "--show" in words else ["0", "1", "2"]
    losses = [f"{each} loss {number}" for each, number in zip(own, numbers, strict=True)]
    assert sorted(line for line in lines if "loss" in line) == losses
    assert sorted(line for line in done.stderr.splitlines() if "warn" in line) == [
        f"{each} a warning" for each in alike
    ]
    for rank in range(3):
        (log,) = tmp_path.glob(f"logs/*/rank-{rank}.log")
        assert sorted(log.read_text().splitlines()) == ["a warning", "loading checkpoint", f"loss {rank}"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((), {"[0-2] loading checkpoint", "[0-2] a warning"}),
        (("--ui",), {"[0-2] loading checkpoint", "[0-2] a warning"}),
        (("--no-merge",), {"[1] loading checkpoint", "[1] a warning"}),
        (("--prefix", "{local_rank}|"), {"1| loading checkpoint", "1| a warning"}),
        (("--stdin", "0"), {"[1] loading checkpoint", "[1] a warning"}),
    ],
)
def test_lines_are_merged_in_a_terminal(start_in_terminal, slow_flush, words, shown):
    each = start_in_terminal(*LIGHT, "--nproc", "3", *words, "train.py", launcher=slow_flush)
    assert each.end() == 0
    assert shown <= {*each.history}
    assert sum("loading" in row for row in each.history) == (1 if "[0-2] a warning" in shown else 3)


def test_held_lines_precede_a_bar_and_messages(start_in_terminal, slow_flush, tmp_path):
    write_program(
        tmp_path,
        "train.py",
        """
        import os, time
        if os.environ["RANK"] == "0":
            print("held", flush=True)
            open("up", "w").close()
        else:
            while not os.path.exists("up"):
                time.sleep(0.01)
            print("before it", flush=True)
            print("\\rbar", end="", flush=True)
        time.sleep(600)
        """,
    )
    each = start_in_terminal(*LIGHT, "--nproc", "2", "train.py", launcher=slow_flush)
    each.until("[1] bar")
    assert each.rows == ["[1] before it", "[1] bar"]
    each.type("\x03")
    each.until("stopping 2 ranks")
    words = [row for row in each.history if "held" in row or "stopping" in row]
    assert len(words) == 2
    assert words[0] == "[0] held"
    assert each.end() == 130


def test_a_line_alone_is_shown_soon(start_in_terminal, tmp_path):
    """The real launcher shows it without a flush, after a fifth of a second."""
    write_program(
        tmp_path, "train.py", "import os, time\nif os.environ['RANK'] == '1': print('early')\ntime.sleep(600)"
    )
    each = start_in_terminal(*LIGHT, "--nproc", "2", "train.py")
    each.until("[1] early", timeout=10)
    each.type("\x03\x03")
    each.end()


def test_no_merge_accepts_any_prefix(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", SPEAKS)
    assert run_in_fork("run", "--nproc", "2", "--no-merge", "--prefix", "none", "--dry-run", "train.py").returncode == 0
