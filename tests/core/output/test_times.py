"""Tests of timestamps of output, and of ``ddplaunch logs --since``."""

import time
from datetime import datetime

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.core.output.streams import TailBuffer
from ddplaunch.core.output.times import Mark, OutputTimes, format_marks, offset_since, parse_marks
from ddplaunch.features.runs.logs import parse_moment
from tests.conftest import wait_until, write_program
from tests.debugger_fixtures import runtime_dir as runtime_dir
from tests.start_modes import LIGHT


def test_times_of_the_output_in_memory():
    times = OutputTimes()
    times.begin(0, None)
    for offset, at in ((0, 10.0), (100, 11.5), (200, 13.0), (300, 20.0)):
        assert times.is_mark_due(at)
        times.add(Mark(offset, at), oldest=150)
        assert not times.is_mark_due(at + 0.9)
    assert [times.since(at) for at in (5, 12, 13.5, 15, 20.9, 21)] == [100, 100, 200, 300, 300, None]
    assert parse_marks(times.format_after(250)) == [Mark(0, 13.0), Mark(50, 20.0)]
    assert parse_marks(times.format_after(200)) == [Mark(0, 13.0), Mark(100, 20.0)]
    assert times.is_mark_due(19.0), "the clock was set back"
    times.begin(350, None)
    assert times.is_mark_due(20.1), "another attempt has a mark of its own"
    times.add(Mark(340, 20.1), oldest=0)
    assert times.since(21.05) == 350


def test_a_line_has_the_time_of_its_end():
    tail = TailBuffer(100)
    tail.add(b"one")
    assert tail.line_start_offset == 0
    tail.add(b"\ntwo")
    assert tail.line_start_offset == 4
    tail.add(b" and more\n")
    assert tail.line_start_offset == tail.total
    tail.add(b"5 %\r6 %")
    assert tail.line_start_offset == tail.total - 3
    tail.add(b"x" * 200)
    assert tail.line_start_offset == tail.total, "it begins further back than what is in memory"


def test_a_line_of_a_full_disk_is_left_out():
    marks = [Mark(0, 10.0), Mark(50, 12.5)]
    assert parse_marks(format_marks(marks, 0) + b"70 \n8") == marks
    assert offset_since([], 10.0) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", "2026-11-26 11:58:30"),
        ("10m", "2026-11-26 11:50:00"),
        ("11:30", "2026-11-26 11:30:00"),
        ("14:30:05", "2026-11-25 14:30:05"),
        ("2026-11-26 09:00", "2026-11-26 09:00:00"),
    ],
)
def test_times_that_users_type(text, expected):
    now = datetime.fromisoformat("2026-11-26 12:00:00").timestamp()
    assert parse_moment(text, now) == datetime.fromisoformat(expected).timestamp()


def test_a_time_of_day_with_its_time_zone():
    now = datetime.fromisoformat("2026-11-26 12:00:00+00:00").timestamp()
    for text, day in (("11:30+05:00", 26), ("23:30+05:00", 25)):
        assert parse_moment(text, now) == datetime.fromisoformat(f"2026-11-{day} {text}").timestamp()


@pytest.mark.parametrize("text", ["", "-5m", "yesterday", "2099-01-01", "25:00"])
def test_invalid_times_are_refused(text):
    with pytest.raises(UsageError, match="expected a time in the past, like 10m, 14:30 or 2026-11-26 14:30"):
        parse_moment(text, time.time())


PHASES = """
import os, sys, time

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("early", rank, flush=True)
while not os.path.exists("on" + attempt):
    time.sleep(0.01)
print("late", rank, flush=True)
open(f"late{rank}-{attempt}", "w").close()
if rank + attempt == "10":
    while not os.path.exists("late0-0"):
        time.sleep(0.01)  # the failure has the other rank stopped
    sys.exit(3)
while not os.path.exists("over"):
    time.sleep(0.01)
print("end", rank, flush=True)
"""


@pytest.mark.ci
@pytest.mark.parametrize("words", [(), ("--log-dir", "logs")], ids=["memory", "files"])
def test_logs_since(start_ddplaunch, run_in_fork, tmp_path, runtime_dir, words):
    """Lines of all attempts while the job runs; afterwards of the stored output."""
    write_program(tmp_path, "phases.py", PHASES)
    job = start_ddplaunch("run", "--run-id", "p", *words, *LIGHT, "--nproc", "2", "--max-restarts", "1", "phases.py")
    job.wait_for("early", 2)
    write_program(tmp_path, "on0", "")
    job.wait_for("early", 4)
    seen = time.time()
    wait_until(lambda: time.time() > seen + 0.001, "the next millisecond, as a file has rounded times")
    since = time.time() + 1
    wait_until(lambda: time.time() > since, "output that is more than a second older")
    write_program(tmp_path, "on1", "")
    job.wait_for("late", 4)
    typed = ("logs", "p", "--since", datetime.fromtimestamp(since).isoformat())
    assert run_in_fork(*typed).stdout == "[0] late 0\n[1] late 1\n"
    assert run_in_fork("logs", "p", "--since", "10m", "--rank", "1").stdout == "early 1\nlate 1\n" * 2
    following = start_ddplaunch(*typed, "--follow", "--rank", "1")
    wait_until(lambda: following.stdout() == "late 1\n", "what came since then")
    write_program(tmp_path, "over", "")
    assert (job.wait(), following.wait()) == (0, 0)
    assert following.stdout() == "late 1\nend 1\n"
    of_each = [f"[{rank}] early {rank}\n[{rank}] late {rank}\n" * (2 if words else 1) for rank in (0, 1)]
    assert run_in_fork("logs", "p", "--since", "1h").stdout == f"{of_each[0]}[0] end 0\n{of_each[1]}[1] end 1\n"
    assert "contradict" in run_in_fork("logs", "p", "--since", "1h", "--tail", "1").stderr
    for path in (tmp_path / "logs").glob("*/*.times"):
        path.unlink()
    done = run_in_fork("logs", "p", "--since", "1h")
    assert (done.returncode, "is missing or empty" in done.stderr) == ((1, True) if words else (0, False))
