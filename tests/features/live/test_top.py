"""Tests of ``ddplaunch top``: a running job watched from another terminal, without slowing it."""

import json
import os
import re
import signal
import socket
from contextlib import suppress
from types import SimpleNamespace

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.features.live import command
from ddplaunch.features.live.command import SocketJobSource
from ddplaunch.observe.diagnosis.inspection import Detail
from tests.conftest import assert_refused, ddplaunch_command, is_alive, wait_until, wait_until_idle, write_program
from tests.debugger_fixtures import runtime_dir as runtime_dir
from tests.fake_nvml import without_gpus
from tests.observe.diagnosis.clauses import NO_WAIT
from tests.start_modes import LIGHT
from tests.terminal_emulator import TerminalEmulator

WAITS = "import os, time\nprint('up', flush=True)\ntime.sleep(600)\n"
STOPS = (
    "import os, signal\nprint('up', flush=True)\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGSTOP)\n"
)


@pytest.fixture
def job(start_ddplaunch, tmp_path, runtime_dir):
    """Start a job of two ranks, by default, and wait until they have printed a line."""
    begun = []

    def begin(run_id: str, program: str = WAITS, ranks: int = 2, *words: str):
        write_program(tmp_path, "train.py", program)
        begun.append(start_ddplaunch("run", "--run-id", run_id, "--nproc", str(ranks), *words, *LIGHT, "train.py"))
        begun[-1].wait_for("up", ranks)
        return begun[-1]

    yield begin
    for each in begun:
        each.process.kill()
        each.assert_nothing_left()


@pytest.fixture
def top(at_terminal, runtime_dir):
    return lambda *words, **options: at_terminal(ddplaunch_command("top", *words), **options)


def opened(each: TerminalEmulator) -> bool:
    """Whether the view fills the screen."""
    return bool(each.rows) and each.rows[-1].startswith("? help  q quit  s stacks  l log")


BUSY = """
import time
print("up", flush=True)
until = time.monotonic() + 600
while time.monotonic() < until:
    time.sleep(0.01)
"""


@pytest.mark.ci
def test_keys_for_the_debugger_and_a_profile(start_ddplaunch, tmp_path, runtime_dir, top):
    """Another command has the terminal, and Ctrl-C, until the user leaves it."""
    write_program(tmp_path, "train.py", BUSY)
    mine = start_ddplaunch("run", "--debug", "--nproc", "2", *LIGHT, "train.py")
    mine.wait_for("up", 2)
    each = top(str(mine.process.pid))
    each.until(lambda each: opened(each) and "train.py" in "".join(each.rows))
    each.type("jjd")
    each.until("(rank 1)")
    each.type("p until > 0\r")
    each.until("True")
    each.type("\x03")
    each.until("Enter to show the ranks")
    each.type("\r")
    each.until(opened)
    each.type("p")
    each.until("TIME")
    each.until("Enter to show the ranks")
    each.type("\rq")
    assert each.end() == 0
    mine.signal(signal.SIGTERM)
    assert mine.wait() == 143
    mine.assert_nothing_left()


@pytest.mark.ci
@without_gpus
def test_the_table_of_ranks_and_one_frame_without_a_terminal(job, top, run_in_fork):
    mine = job("mine")
    each = top(str(mine.process.pid))
    rows = [
        *("mine: train.py", r"running \d\d:\d\d \| \d+ MiB", r"CPU % \d+ ▁*", ".*"),
        "rank +state +CPU% +mem +pid +doing +last line *",
        *(rf" *{number} running +\d+ +\d+M +{pid} train.py:3 +up" for number, pid in enumerate(mine.ranks())),
    ]
    each.until(lambda each: opened(each) and all(map(re.fullmatch, rows, each.rows)))
    each.type("q")
    assert each.end() == 0
    assert each.is_restored
    assert each.rows[-1] == "0 .."
    assert each.raw.endswith(b"\n")
    for option, ranks in (("--rank", "1"), ("--ranks", "1"), ("--rank", "running"), ("", "")):
        done = run_in_fork("top", "mine", *((option, ranks) if ranks else ()))
        assert (done.returncode, done.stderr) == (0, "")
        first, *others = done.stdout.splitlines()
        assert re.match(r"running \d\d:\d\d \| CPU \d+ % \| \d+ MiB", first)
        assert others == ([". running: rank 1"] if ranks == "1" else [". running: 2 ranks", "0 .."])
    dumb = top("mine", env={"TERM": "dumb"})
    assert dumb.end() == 0
    assert dumb.rows[-1] == "0 .."
    assert b"\x1b" not in dumb.raw
    found = json.loads(run_in_fork("top", "mine", "--json").stdout)
    assert list(found) == ["status", "inspection", "doing", "waits", "collectives_per_second", "cpus", "memory"]
    assert (found["status"]["run_id"], found["status"]["state"]) == ("mine", "running")
    assert found["status"]["time_by_phase"]["imports"] > 0 < found["status"]["time_by_phase"]["steady"]
    assert found["doing"] == {"0": "running", "1": "running"}
    assert [rank["pid"] for rank in found["inspection"]["ranks"]] == mine.ranks()
    assert found["collectives_per_second"] is None
    assert found["memory"]["0"] > 1 << 20
    assert (mine.process.poll(), mine.stderr()) == (None, "")


@pytest.mark.ci
def test_keys_show_pages_in_place_of_the_table(job, top):
    mine = job("keys")
    each = top("keys")
    each.until(opened)

    def press(keys: str, seen: str) -> None:
        each.type(keys)
        each.until(seen)
        each.type("\x1b")
        each.until(opened)

    press("l1\r", "[1] up")
    press("l7\r", "ddplaunch: rank 7 has no output in memory on this node")
    press("f", "no rank has failed")
    press("s", NO_WAIT)
    press("?", "quit this view")
    each.type("\x1b[B\x1b[Bl\r")  # the second rank is chosen
    press("", "[1] up")
    press("\r", "rank 1: train.py:3 (running)")
    assert "x stop" in each.rows[-1]
    each.type("oo")
    each.until("o order: CPU%")
    each.type("x")
    each.until("stop the job? y or n: _")
    each.type("n")
    each.until(opened)
    assert mine.process.poll() is None
    each.type("xy")
    assert each.end() == 0
    assert each.rows[-1] == "ddplaunch: keys has ended, exit code 130"
    left = each.raw.decode().rpartition("\x1b[?1049l")[2]
    assert left.count("ended, exit code 130") == 2, "in the last frame too"


@pytest.mark.ci
def test_a_stopped_rank_and_a_suspended_launcher(job, top):
    mine = job("stops", STOPS + WAITS)
    each = top("stops")
    each.until(lambda each: any(re.match(r" +1 stopped ", row) for row in each.rows))
    each.type("z")
    each.until("T stopped: rank 1   . running: rank 0   ? help")
    assert each.rows[-1] == "0 .T"
    each.type("/stopped\r")
    each.until("| filter: stopped")
    assert "T stopped: rank 1   ? help" in each.rows
    os.kill(mine.ranks()[1], signal.SIGCONT)
    each.until("no rank matches the filter")
    each.type("/\rz")
    each.until(opened)
    pids = [*mine.ranks(), mine.process.pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        each.until(f"kill -CONT {mine.process.pid}")
        assert re.match(r"suspended \d\d:\d\d", each.rows[1]), each.rows
        each.until(lambda each: sum(bool(re.match(r" +[01] stopped ", row)) for row in each.rows) == 2)
        each.type("?")
        each.until("quit this view")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    each.type("\x1b")
    each.until(lambda each: opened(each) and each.rows[1].startswith("running "))
    mine.signal(signal.SIGINT)
    assert each.end() == 0
    assert each.rows[-1] == "ddplaunch: stops has ended, exit code 130"
    assert each.is_restored


def test_a_dropped_connection_is_opened_again(tmp_path):
    """A suspended launcher drops its clients; only where the socket is gone has the job ended."""
    path, answers, ends = f"{tmp_path}/socket.{os.getpid()}", [], []
    loop = EventLoop()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(0)
        SocketJobSource(loop, path, lambda: ends.append("lost")).inspect(Detail.STATE, answers.append)
        listener.accept()[0].close()
        connections = []
        while not connections:
            loop.run_once()
            with suppress(BlockingIOError):
                connections.append(listener.accept()[0])
        assert not ends
        os.unlink(path)
        connections[0].close()
        while not ends:
            loop.run_once()
    assert (answers, ends) == ([], ["lost"])


@pytest.mark.ci
def test_a_viewer_that_ends_leaves_the_terminal_and_the_job_as_before(job, top):
    """The launcher is idle after a viewer has ended by a signal, by SIGKILL or with its terminal."""
    mine = job("viewed", WAITS, 2, "--no-history")  # without samples for its history
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        each = top("viewed")
        each.until(opened)
        if number in (signal.SIGHUP, signal.SIGQUIT):
            each.type("z")
            each.until(lambda each: each.shows_frame)
        if number == signal.SIGINT:
            each.type("\x03")
        else:
            each.process.send_signal(number)
        assert each.end() == 128 + number
        assert each.is_restored
        assert each.raw.count(b"\x1b[?1049h") == 1
    killed = top("viewed")
    killed.until(opened)
    killed.process.kill()
    killed.process.wait()
    closed = top("viewed")
    closed.until(opened)
    os.close(closed.master)
    os.close(closed._slave)
    wait_until(lambda: closed.process.poll() is not None, "its end")
    closed.master, closed._slave = os.openpty()
    assert mine.process.poll() is None
    assert all(map(is_alive, mine.ranks()))
    wait_until_idle(mine.process.pid)


@pytest.mark.ci
def test_the_list_of_jobs(job, top, run_in_fork):
    for run in ("first", "second"):
        job(run, WAITS, 1, "--no-history")  # the history may be written to in another order
    assert_refused(
        run_in_fork("top"), " runs are in progress: pick one\n", "second (", "first ("
    )  # other tests' jobs too
    assert_refused(run_in_fork("top", "third"), 'no run named "third"')
    assert run_in_fork("top", "sec").stdout.endswith(". running: rank 0\n")
    each = top()
    each.until(lambda each: each.rows and each.rows[-1].startswith("Up, Down"))
    assert each.rows[0].split() == ["RUN", "STATE", "AGE", "RANKS", "TARGET"]
    job("third", WAITS, 1, "--no-history")
    each.until("third")
    running = [row.split()[0] for row in each.rows[1:-1] if row]
    assert running.index("second") < running.index("first"), "the latest first"
    each.type("\x1b[B" * running.index("first") + "\r")
    each.until("first: train.py")
    each.type("q")
    assert each.end() == 0
    assert each.is_restored


def test_the_list_of_jobs_ends_once_the_terminal_has_taken_all_output(monkeypatch):
    ends = list[bool]()

    class SlowScreen:
        def __init__(self, loop):
            self.is_drained = False
            self.begin = lambda render, on_key: loop.call_soon(lambda: on_key("q"))
            self.end = lambda: loop.call_later(0.01, lambda: setattr(self, "is_drained", True))
            self.close = lambda: ends.append(self.is_drained)
            self.refresh = lambda: None
            self.set_full_screen = lambda on: None

    monkeypatch.setattr(command, "_make_screen", SlowScreen)
    monkeypatch.setattr(command, "index_runs", lambda: SimpleNamespace(running={}))
    monkeypatch.setattr(EventLoop, "add_signal_handlers", lambda *words: None)
    assert (command.JobChooser().run(), ends) == (0, [True])
