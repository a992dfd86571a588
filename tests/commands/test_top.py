"""``ddplaunch top``: looking at a running job from another terminal, which it must not notice."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import alive, command, wait_until, write
from tests.emulator import Emulator
from tests.starts import LIGHT

WAITS = "import os, time\nprint('up', flush=True)\ntime.sleep(600)\n"
STOPS = (
    "import os, signal\nprint('up', flush=True)\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGSTOP)\n"
)

Top = Callable[..., Emulator]


@pytest.fixture
def runtime(tmp_path_factory, monkeypatch) -> Path:
    """Doors of this test alone; a short path, as those of sockets are."""
    path: Path = tmp_path_factory.mktemp("r")
    path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.setenv("XDG_STATE_HOME", str(path / "state"))  # no newer run has the names that are used here
    monkeypatch.setattr("ddplaunch.job.folder.candidates", lambda: [str(path / "ddplaunch")])
    return path


@pytest.fixture
def job(start, tmp_path, runtime):
    """A job of two ranks, of which one has stopped itself where that is asked for."""

    begun = []

    def begin(run_id: str, program: str = WAITS, ranks: int = 2):
        write(tmp_path, "train.py", program)
        begun.append(start("run", "--run-id", run_id, "--nproc", str(ranks), *LIGHT, "train.py"))
        begun[-1].wait_for("up", ranks)
        return begun[-1]

    yield begin
    for each in begun:
        each.process.kill()
        each.assert_nothing_left()


@pytest.fixture
def top(tmp_path, runtime) -> Iterator[Top]:
    begun: list[Emulator] = []

    def begin(*words: str, env: dict[str, str] | None = None, **size: int) -> Emulator:
        begun.append(Emulator(command("top", *words), tmp_path, env, **size))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()


def name(job) -> str:
    """What tells it from the jobs of other tests."""
    return str(job.process.pid)


def test_a_look_and_away(job, top):
    mine = job("mine")
    each = top(name(mine))
    each.until(lambda each: each.framed and "CPU" in each.rows[-3])
    assert re.fullmatch(r"running \d\d:\d\d \| CPU \d+ % \| \d+ MiB", each.rows[-3])
    assert each.rows[-2:] == [". running: 2 ranks   ? help", "0 .."]
    each.type("q")
    assert each.end() == 0
    assert each.given_back
    assert each.rows[-1] == "0 .."
    assert each.raw.endswith(b"\n")
    assert mine.process.poll() is None
    assert mine.stderr() == ""


def test_keys(job, top):
    mine = job("keys")
    each = top("keys")
    each.until(lambda each: each.framed)
    each.type("l1\r")
    each.until("[1] up")
    each.type("l7\r")
    each.until("ddplaunch: rank 7 has printed nothing that is in memory here")
    each.type("f")
    each.until("ddplaunch: no rank has failed")
    each.type("s")
    each.until("no rank waits for another rank")
    each.until("train.py:3")
    each.until(lambda each: each.framed)
    assert mine.process.poll() is None


def test_who_is_stopped(job, top):
    mine = job("stopped", STOPS + WAITS)
    each = top("stopped")
    each.until("T stopped: rank 1   . running: rank 0   ? help")
    assert each.rows[-1] == "0 .T"
    each.type("/stopped\r")
    each.until("| filter: stopped")
    assert "T stopped: rank 1   ? help" in each.rows
    os.kill(mine.ranks()[1], signal.SIGCONT)
    each.until("no rank of this kind")


def test_the_job_ends(job, top):
    mine = job("ends")
    each = top("ends")
    each.until(lambda each: each.framed)
    mine.signal(signal.SIGINT)
    assert each.end() == 0
    assert each.rows[-1] == "ddplaunch: ends has ended, exit code 130"
    assert each.given_back


def test_a_launcher_that_is_suspended(job, top):
    mine = job("suspended")
    each = top("suspended")
    each.until(lambda each: each.framed)
    os.kill(mine.process.pid, signal.SIGSTOP)
    try:
        each.until("no answer for 3 s")
        each.type("?")
        each.until("leave the view")
    finally:
        os.kill(mine.process.pid, signal.SIGCONT)
    each.until(lambda each: each.framed)
    each.type("q")
    assert each.end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("full", [False, True])
def test_signals_give_the_terminal_back(job, top, number, full):
    mine = job("signals")
    each = top("signals")
    each.until(lambda each: each.framed)
    if full:
        each.type("z")
        each.until("s stacks")
    if number == signal.SIGINT:
        each.type("\x03")
    else:
        each.process.send_signal(number)
    assert each.end() == 128 + number
    assert each.given_back
    assert each.raw.count(b"\x1b[?1049h") == full
    assert mine.process.poll() is None


def test_the_viewer_is_killed(job, top):
    mine = job("killed")
    each = top("killed")
    each.until(lambda each: each.framed)
    each.process.kill()
    each.process.wait()
    assert mine.process.poll() is None
    assert all(map(alive, mine.ranks()))
    again = top("killed")
    again.until(lambda each: each.framed)


def test_the_terminal_goes_away(job, top):
    job("gone")
    each = top("gone")
    each.until(lambda each: each.framed)
    os.close(each.master)
    os.close(each._slave)
    wait_until(lambda: each.process.poll() is not None, "its end")
    each.master, each._slave = os.openpty()


@pytest.mark.parametrize("ranks", ["1", "running", ""])
def test_elsewhere_than_in_a_terminal_one_frame_is_printed(job, launch, ranks):
    job("once")
    done = launch("top", "once", *(("--ranks", ranks) if ranks else ()))
    assert (done.returncode, done.stderr) == (0, "")
    first, *others = done.stdout.splitlines()
    assert re.match(r"running \d\d:\d\d \| CPU \d+ % \| \d+ MiB", first)
    assert others == ([". running: rank 1"] if ranks == "1" else [". running: 2 ranks", "0 .."])


def test_a_dumb_terminal(job, top):
    job("dumb")
    each = top("dumb", env={"TERM": "dumb"})
    assert each.end() == 0
    assert each.rows[-1] == "0 .."
    assert b"\x1b" not in each.raw


def test_json(job, launch):
    mine = job("as-json")
    done = launch("top", "as-json", "--json")
    found = json.loads(done.stdout)
    assert list(found) == ["status", "inspection", "doing", "waits", "collectives_per_second", "cpus", "memory"]
    assert (found["status"]["run_id"], found["status"]["state"]) == ("as-json", "running")
    assert found["doing"] == {"0": "running", "1": "running"}
    assert [rank["pid"] for rank in found["inspection"]["ranks"]] == mine.ranks()
    assert found["collectives_per_second"] is None
    assert found["memory"]["0"] > 1 << 20


def test_which_job(job, launch):
    job("one"), job("other")
    done = launch("top")
    assert done.returncode == 2
    assert "one" in done.stderr
    assert launch("top", "oth").returncode == 0
    done = launch("top", "third")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert "third" in done.stderr
    assert done.stderr.count("\n") <= 3


@pytest.mark.slow
def test_nobody_looking_costs_nothing(job, top):
    """The launcher has the switches of a job that nobody looks at, once the viewer has gone."""
    mine = job("idle")

    def switches() -> int:
        text = Path(f"/proc/{mine.process.pid}/status").read_text()
        return sum(int(count) for count in re.findall(r"ctxt_switches:\t(\d+)", text))

    each = top("idle")
    each.until(lambda each: each.framed and "CPU" in each.rows[-3])
    each.type("q")
    each.end()
    time.sleep(0.5)  # not as synchronisation: in this time nothing may happen
    before = switches()
    time.sleep(2)
    assert switches() - before <= 1
