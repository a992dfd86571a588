"""Tests of the live view below a run's own output (``run --ui``), at an emulated terminal."""

import re
import signal
from pathlib import Path

import pytest

from ddplaunch.features.live import feature
from tests.conftest import assert_refused, conflict, ddplaunch_command, wait_until, write_program
from tests.start_modes import LIGHT
from tests.terminal_emulator import FRAME, TerminalEmulator

CHATS = """
import os, sys, time
rank, count = int(os.environ["RANK"]), int(sys.argv[1])
for number in range(count):
    print(f"line {number} of rank {rank} " + "x" * (number % 40), flush=True)
    time.sleep(0.01)
print(f"rank {rank} has printed all", flush=True)
time.sleep(0 if len(sys.argv) > 2 else 600)
"""


@pytest.fixture
def start_view(at_terminal, tmp_path: Path):
    """Start ``ddplaunch run --ui`` in a terminal."""
    write_program(tmp_path, "chats.py", CHATS)
    return lambda *words, **options: at_terminal(ddplaunch_command("run", "--ui", *LIGHT, *words), **options)


def frames(each: TerminalEmulator) -> list[str]:
    """The first rows of all frames on the screen and above it."""
    return [row for row in each.history if FRAME.match(row)]


@pytest.mark.ci
def test_the_footer_stays_below_the_log(start_view):
    each = start_view("--nproc", "3", "chats.py", "200")
    each.until(lambda each: any("line 50 of rank 0" in row for row in each.history) and each.shows_frame)
    assert "green" in each.colours
    assert each.rows[-2:] == [". running: 3 ranks   ? help", "0 ..."]
    each.until(lambda each: sum("has printed all" in row for row in each.history) == 3 and each.shows_frame)
    assert len(frames(each)) == 1, "a frame was left among the lines"
    log = [row for row in each.history if row.startswith("[")]
    for rank in range(3):
        mine = [row for row in log if f"of rank {rank} " in f"{row} "]
        assert mine == [f"[{rank}] line {n} of rank {rank} {'x' * (n % 40)}".rstrip() for n in range(200)]


@pytest.mark.ci
def test_the_last_frame_stays_and_the_terminal_is_as_before(start_view):
    each = start_view("--nproc", "2", "chats.py", "300", "ends", env={"NO_COLOR": "1"})
    # Not a whole frame: where what is read lags behind what is printed, each read may end between lines and frame.
    each.until(lambda each: b"\x1b[J" in each.raw)
    assert each.settings != each.before
    assert each.end() == 0
    assert each.is_restored
    assert re.match(r"ended, exit code 0 \d\d:\d\d", each.rows[-3])
    assert each.rows[-2:] == ["e ended: 2 ranks", "0 ee"]
    assert each.raw.endswith(b"\r\n")
    assert each.colours == {"default"}
    assert b"\x1b[1;" not in each.raw
    # 200 lines a second: a frame is drawn 30 times a second at most, and what clears is followed by what is drawn.
    _, *drawn = each.raw.split(b"\x1b[J")
    assert 2 < len(drawn) < 250
    assert all(len(part) > 20 for part in drawn)


def test_failures_of_this_attempt_and_earlier_ones(start_view, tmp_path):
    program = """
        import os, sys, time
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("first")
        while not os.path.exists("fail"):
            time.sleep(0.01)
        sys.exit(3 if os.environ["RANK"] == "1" else 0)
    """
    write_program(tmp_path, "fails.py", program)
    each = start_view("--nproc", "2", "--max-restarts", "1", "--min-uptime", "0", "fails.py")
    each.until("| attempt 2")
    each.type("f")
    each.until(lambda each: sum("ValueError: first" in row for row in each.history) > 1)
    each.until("no rank has failed")
    (tmp_path / "fail").touch()
    assert each.end() == 3
    end, report = (
        next(place for place, row in enumerate(each.rows) if row.startswith(start))
        for start in ("ended, exit code 3", "ddplaunch: rank 1 exited")
    )
    assert end < report
    assert any(row.startswith("X failed: rank 1   ") for row in each.rows)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_restores_the_terminal(start_view, number):
    """A signal restores the terminal from the full screen, while the user types a filter."""
    each = start_view("--nproc", "2", "chats.py", "10")
    each.until(lambda each: each.shows_frame)
    each.type("z")
    each.until("s stacks  l log")
    each.type("/12")
    each.until("waiting: 12_")
    each.type("\x03") if number == signal.SIGINT else each.process.send_signal(number)
    assert each.end() == 128 + number
    assert each.is_restored
    assert each.raw.count(b"\x1b[?1049h") == 1
    assert "0 ee" in each.rows


@pytest.mark.parametrize(("terminals", "is_shown"), [([1], True), ([2], True), ([], False)])
def test_one_of_stdout_and_stderr_is_enough(monkeypatch, terminals, is_shown):
    monkeypatch.setattr(feature, "is_interactive", terminals.__contains__)
    monkeypatch.setattr(feature, "can_move_cursor", lambda: True)
    assert (feature._why_no_live_view() is None) == is_shown


def test_ctrl_c_before_the_first_frame(start_view):
    each = start_view("--nproc", "2", "chats.py", "10")
    wait_until(lambda: each.settings != each.before or each.process.poll() is not None, "the keyboard")
    each.type("\x03")
    assert each.end() == 130
    assert each.is_restored


@pytest.mark.ci
def test_the_full_screen_and_back(start_view):
    each = start_view("--nproc", "2", "chats.py", "250")
    each.until(lambda each: each.shows_frame)
    each.type("z")
    each.until("s stacks  l log")
    assert "chats.py 250" in each.rows[0]
    assert not [row for row in each.rows if row.startswith("[")]
    each.until(lambda each: any(re.match(r" +1 +running", row) for row in each.rows))
    each.type("\x1b")
    each.until(lambda each: sum("has printed all" in row for row in each.history) == 2 and each.shows_frame)
    assert b"\x1b[?1049l" in each.raw


def test_keys_and_the_size_of_the_terminal(start_view):
    each = start_view("--nproc", "2", "chats.py", "1")
    each.until(lambda each: each.shows_frame)
    each.type("?")
    each.until("q  quit this view; the job continues")
    each.type("xxyyf")  # what is typed ahead is not shown
    each.until("no rank has failed")
    assert not [row for row in each.history if "xxyy" in row]
    each.type("l1\r")
    each.until(lambda each: sum(row.startswith("[1] rank 1 has printed all") for row in each.history) == 2)
    each.type("l7\r")
    each.until("rank 7 has no output")
    each.type("/")
    each.until("filter: 0,3-5, or a word like waiting: _")
    each.type("12\x7f\r")
    each.until(
        lambda each: any(row.endswith("| filter: 1") for row in each.rows) and ". running: rank 1   ? help" in each.rows
    )
    each.type("/9\x1b\x1b[A\x1b[Bw")  # arrows, and a letter without a meaning
    each.type("/\r")
    each.until("0 ..")
    for columns, rows in ((100, 30), (40, 10), (80, 3), (200, 50), (80, 24)):
        each.resize(columns, rows)
        before = len(each.raw)
        each.until(lambda each, before=before: b"running" in each.raw[before:])
        assert all(len(row) < columns for row in each.rows if "running" in row)
    each.until(lambda each: each.shows_frame)
    assert len([row for row in each.rows if FRAME.match(row)]) == 1
    each.type("\x1c")
    each.until("inspecting the ranks")
    each.until(lambda each: any("chats.py:7 (" in row for row in each.history) and each.shows_frame)
    each.type("q")
    each.until(lambda each: each.settings == each.before)
    assert each.process.poll() is None
    each.type("\x03")
    assert each.end() == 130


def test_the_option_has_no_effect_without_a_capable_terminal(start_view, run_ddplaunch):
    done = run_ddplaunch("run", "--ui", *LIGHT, "--nproc", "2", "chats.py", "1", "ends")
    assert done.stderr == "ddplaunch: --ui has no effect: the output is not a terminal\n"
    assert sorted(done.stdout.splitlines())[0] == "[0] line 0 of rank 0 "
    each = start_view("--nproc", "2", "chats.py", "1", "ends", env={"TERM": "dumb", "NO_COLOR": "1"})
    assert each.end() == 0
    assert "ddplaunch: --ui has no effect: TERM=dumb cannot move the cursor" in each.rows
    assert b"\x1b" not in each.raw


def test_ctrl_z_gives_the_terminal_to_the_shell_until_fg(at_terminal, tmp_path):
    shell = at_terminal(["bash", "--norc", "-i"], {"PS1": "$ ", "HISTFILE": ""})
    write_program(tmp_path, "chats.py", CHATS)
    shell.until("$")
    shell.type(" ".join(ddplaunch_command("run", "--ui", *LIGHT, "--nproc", "2", "chats.py", "1")) + "\n")
    shell.until(lambda each: each.shows_frame)
    shell.type("\x1a")
    shell.until("Stopped")
    shell.type("stty -a | grep -o ' icanon'; echo $((41 + 1))\n")
    shell.until("42")
    assert " icanon" in shell.rows
    shell.type("fg\n")
    shell.until(lambda each: each.shows_frame)
    shell.type("?")
    shell.until("quit this view")
    shell.type("\x03")
    shell.until("stopping 2 ranks")
    shell.until("e ended: 2 ranks")
    shell.type("exit\n")
    shell.end()


@pytest.mark.parametrize(("words", "other"), [("--stdin 0 --nproc 2", "--stdin 0"), ("--hosts a:1", "--hosts")])
def test_options_that_the_view_does_not_work_with(run_in_fork, tmp_path, words, other):
    write_program(tmp_path, "chats.py", CHATS)
    assert_refused(run_in_fork("run", "--ui", *words.split(), "chats.py"), conflict("--ui", other))


@pytest.mark.ci
def test_the_view_says_which_ranks_wait_for_which(start_view, tmp_path):
    write_program(
        tmp_path,
        "hangs.py",
        """
        import time, torch
        import torch.distributed as dist

        def load_batch():
            time.sleep(600)

        dist.init_process_group("gloo")
        for step in range(40):
            if step == 20 and dist.get_rank() == 2:
                load_batch()
            dist.all_reduce(torch.ones(6))
        """,
    )
    each = start_view("--preload", "torch", "--nproc", "3", "hangs.py")
    each.until("rank 2 has not entered it", 60)
    each.until("2 of 3 ranks waiting", 60)
    each.until("! awaited: rank 2   w waiting: 2 ranks   ? help", 60)
    found = " ".join(row.strip() for row in each.rows)
    assert "ranks 0, 1 wait in all_reduce #21 of default_pg (float32[6]), entered at hangs.py:11" in found
    assert "load_batch at hangs.py:5" in found
    assert "0 ww!" in each.rows
    each.type("s")
    each.until(lambda each: sum("wait in all_reduce #21" in row for row in each.history) > 1)
    each.type("\x03\x03")
    each.end()


@pytest.mark.ci
def test_the_view_names_a_slow_rank(start_view, tmp_path):
    write_program(
        tmp_path,
        "slow.py",
        """
        import time, torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        while True:
            time.sleep(0.1 if dist.get_rank() == 1 else 0.01)
            dist.all_reduce(torch.ones(6))
        """,
    )
    each = start_view("--preload", "torch", "--nproc", "3", "slow.py")
    each.until("rank 1 was last in", 60)
    first = re.compile(r"running \d\d:\d\d \| \d+(\.\d)? collectives/s")
    assert any(map(first.match, each.rows)), "below what torch may say of a slow start"
    each.type("\x03\x03")
    each.end()
