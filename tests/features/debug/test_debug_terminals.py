"""Tests of debuggers that need a terminal (ipdb, pudb, IPython), which is relayed to ``ddplaunch debug``."""

import os
import select
import signal
import termios
from types import SimpleNamespace

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.features.debug import rank_terminal
from ddplaunch.features.debug.user_terminals import RemoteTerminal
from tests.conftest import wait_until, write_program
from tests.debugger_fixtures import TAKEN_OVER, pipe_to_debugger, wait_for_stops
from tests.debugger_fixtures import debug_job as debug_job
from tests.debugger_fixtures import debug_terminal as debug_terminal
from tests.debugger_fixtures import runtime_dir as runtime_dir
from tests.start_modes import EXEC, LIGHT

pytestmark = pytest.mark.slow

STEPS = """
import os
import sys

rank = int(os.environ["RANK"])


def step(n):
    loss = n + 7
    if os.environ["RANK"] in sys.argv[1:]:
        {}
    loss += 1
    print("step", n, loss, flush=True)


for n in range(2):
    step(n)
print("done", os.isatty(0), os.isatty(1), flush=True)
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where these debuggers keep their settings; pudb greets who has none."""
    write_program(tmp_path, "home/.config/pudb/pudb.cfg", "[pudb]\nseen_welcome = e999\nprompt_on_quit = False\n")
    for name, value in {"HOME": "home", "XDG_CONFIG_HOME": "home/.config", "IPYTHONDIR": "home/ipython"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")  # which the emulator does not answer


IPDB = {"PYTHONBREAKPOINT": "ipdb.set_trace"}


@pytest.mark.ci
def test_ipdb_at_the_terminal_of_the_job(debug_terminal, home, tmp_path):
    """The terminal shows the output of ipdb; that of the program stays in the rank's log."""
    write_program(tmp_path, "train.py", STEPS.format("breakpoint() if n == 0 else __import__('ipdb').set_trace()"))
    each = debug_terminal("run", *EXEC, "--no-merge", "--nproc", "2", "train.py", "1", env=IPDB)
    each.until(lambda each: each.rows[-1:] == ["ipdb>"])
    assert "ddplaunch: rank 1 is in ipdb; after Ctrl-]: detach, q, @RANK, Enter (back)" in each.rows
    each.type("p loss * 6\r")
    each.until("42")
    each.type("n\r")
    each.until(lambda each: any(row.startswith("---> 12") for row in each.rows) and each.rows[-1] == "ipdb>")
    each.type("p 1 + \x03p loss\r")  # Ctrl-C is ipdb's
    each.until("8")
    each.type("c\r")
    each.until("[1] step 0 8")
    each.until(lambda each: each.rows[-1] == "ipdb>")
    each.type("c\r")
    assert each.end() == 0
    assert each.is_restored
    assert "[1] step 1 9" in each.history
    assert "[1] done False False" in each.history


@pytest.mark.ci
def test_q_in_ipdb_ends_the_job_with_one_line(debug_terminal, home, tmp_path):
    write_program(tmp_path, "train.py", STEPS.format("breakpoint()"))
    each = debug_terminal("run", *LIGHT, "--nproc", "2", "train.py", "1", env=IPDB)
    each.until(lambda each: each.rows[-1:] == ["ipdb>"])
    each.type("q\r")
    assert each.end() == 128 + signal.SIGTERM
    assert any(row.startswith("ddplaunch: rank 1: q ") for row in each.history)
    assert not any("BdbQuit" in row for row in each.history)
    assert each.is_restored


@pytest.mark.ci
def test_between_ranks_and_out_of_a_debugger(debug_terminal, home, tmp_path):
    write_program(tmp_path, "train.py", STEPS.format("breakpoint()"))
    each = debug_terminal("run", *LIGHT, "--nproc", "3", "train.py", "1", "2", env=IPDB)
    each.until(lambda each: each.rows[-1:] == ["ipdb>"])
    each.type("p rank * 100\r")
    each.until(lambda each: {"100", "200"} & {*each.rows} and each.rows[-1] == "ipdb>")
    here = 1 if "100" in each.rows else 2
    each.type("\x1d")
    each.until(lambda each: each.rows[-1] == f"(rank {here})")
    each.type("p\trank\r")  # no completion here
    each.until(f"rank {here} is in ipdb, which needs ")
    each.until(lambda each: sum("is at a breakpoint" in row for row in each.history) == 2)
    each.type(f"@{3 - here}\r")
    each.until(lambda each: each.rows[-1] == "ipdb>")
    each.type("p rank * 1000\r")
    each.until(str((3 - here) * 1000))
    each.type("\x1d")
    each.until(lambda each: each.rows[-1] == f"(rank {3 - here})")
    each.type("detach\r")
    each.until(lambda each: each.rows[-1] == "ipdb>")
    each.type("\x1d")
    each.until(lambda each: each.rows[-1] == f"(rank {here})")
    each.type("detach\r")
    assert each.end() == 0
    assert each.is_restored
    assert sum("step 1 9" in row for row in each.history) >= 1


@pytest.mark.ci
def test_pudb_draws_on_the_whole_terminal_and_follows_its_size(debug_job, debug_terminal, home):
    """The rank resumes when the client ends, although pudb ignores the end of its terminal."""
    job = debug_job(STEPS.format("breakpoint()"), "1", env={"PYTHONBREAKPOINT": "pudb.set_trace", "TERM": "dumb"})
    first = debug_terminal("debug", "demo", columns=100)
    first.until(lambda each: any("PuDB" in row for row in each.rows) and any("loss: 7" in row for row in each.rows))
    first.resize(70, 20)
    first.until(lambda each: any("loss: 7" in row for row in each.rows) and len(each.rows) <= 20)
    second = debug_terminal("debug", "demo", columns=90)
    second.until(lambda each: any("loss: 7" in row for row in each.rows))
    first.until(TAKEN_OVER)
    second.type("n")
    second.until(lambda each: any("loss: 8" in row for row in each.rows))
    second.process.kill()
    assert job.wait() == 0, job.stderr()
    assert "step 1 9" in job.stdout()
    assert "done False False" in job.stdout()


@pytest.mark.ci
def test_a_program_that_has_all_keys_can_be_left_while_the_launcher_is_suspended(debug_job, debug_terminal, home):
    job = debug_job(STEPS.format("breakpoint()"), "1", env={"PYTHONBREAKPOINT": "pudb.set_trace", "TERM": "dumb"})
    each = debug_terminal("debug", "demo")
    each.until(lambda each: any("loss: 7" in row for row in each.rows))
    job.signal(signal.SIGSTOP)
    each.type("n")
    with open(f"/proc/{each.process.pid}/fd/0", "rb") as keyboard:
        wait_until(lambda: not select.select([keyboard], [], [], 0)[0], "this key to be read")
    each.type("\x1d")
    wait_until(lambda: each.settings[3] & termios.ISIG, "Ctrl-C to be a signal again")
    each.type("\x03")
    assert each.end() == 130
    assert each.settings == each.before
    assert each.raw.rindex(b"\x1b[?1049;") > each.raw.rindex(b"\x1b[?1049h")
    job.signal(signal.SIGCONT)
    assert job.wait() == 0, job.stderr()


def test_a_client_gets_the_reason_of_a_refusal_while_a_program_draws():
    sent = []
    terminal = RemoteTerminal(sent.append, lambda: None, 80, 24)
    terminal.lend(True)
    terminal.show("ddplaunch: refused\n")
    terminal.leave(2)
    assert b"".join(each.data for each in sent).endswith(b"ddplaunch: refused\n")
    assert (sent[-1].exit_code, sent[-1].is_raw) == (2, False)


def test_of_keys_that_a_rank_does_not_read_only_so_many_are_kept(monkeypatch):
    loop, is_full, written = EventLoop(), True, bytearray()
    terminal = rank_terminal.RankTerminal(loop, lambda data: None)

    def write(fd, data):
        if is_full:
            raise BlockingIOError
        written.extend(data)
        return len(data)

    monkeypatch.setattr(rank_terminal, "os", SimpleNamespace(write=write, close=os.close))
    before = b"." * (rank_terminal._SCROLLBACK_BYTES - 4)
    for keys in (before, b"last", b"over", b"more"):
        terminal.write_input(keys)
    is_full = False
    loop.run_once()
    assert written == before + b"last"
    terminal.write_input(b"later")
    assert written.endswith(b"lastlater")
    terminal.close()


@pytest.mark.ci
def test_embed_sees_the_frame_that_called_it(debug_job, debug_terminal, home, monkeypatch):
    monkeypatch.delenv("TERM", raising=False)
    asks = "import IPython; IPython.embed(); print('on, TERM' if 'TERM' in os.environ else 'on, none', flush=True)"
    job = debug_job(STEPS.format(asks), "1")
    each = debug_terminal("debug", "demo")
    each.until("In [1]:")
    each.type("loss * 6 + rank\r")
    each.until("Out[1]: 43")
    each.type("exit\r")
    each.until(lambda each: sum("In [1]:" in row for row in each.history) == 2)
    assert "on, none" in job.stdout()
    each.type("\x1d\x04")
    each.until(lambda each: job.process.poll() is not None)
    assert job.wait() == 0
    assert "step 1 9" in job.stdout()
    assert "really" not in job.stdout() + job.stderr()


@pytest.mark.ci
def test_an_external_debugger_without_terminal_and_client(debug_job, home, tmp_path):
    job = debug_job(STEPS.format("breakpoint()"), "0", "1", env=IPDB)
    wait_for_stops(job, 2)
    done = pipe_to_debugger(tmp_path, "p loss\n@1 detach\n", "demo")
    assert "is in ipdb, which needs a terminal; commands here: detach, q, @RANK" in done.stdout
    assert job.wait() == 0
    late = ("--debug", "--debug-timeout", "2", "--timeout", "60")
    job = debug_job(STEPS.format("breakpoint()"), "1", options=late, env=IPDB)
    assert job.wait() == 0, job.stderr()
    assert "rank 1 resumes: no input for 2.0s (--debug-timeout)" in job.stderr()
    job.assert_nothing_left()


@pytest.mark.ci
def test_nothing_stays_of_a_terminal_when_launcher_or_rank_is_killed(debug_job, home):
    for killed in ("rank", "launcher"):
        job = debug_job(STEPS.format("breakpoint()"), "0", "1", env=IPDB)
        wait_for_stops(job, 2)
        if killed == "rank":
            os.kill(job.ranks()[1], signal.SIGKILL)
            assert job.wait() != 0
        else:
            job.signal(signal.SIGKILL)
            job.process.wait()
        job.assert_nothing_left()
