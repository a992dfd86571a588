"""Tests of failures while ranks are in their debugger: of clients, ranks, launchers and their messages."""

import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ddplaunch.cli.client import send_request
from ddplaunch.core.control_socket.status_request import StatusQuery
from ddplaunch.features.debug.rank.rank_debugger import DebugConnection
from tests.conftest import (
    clean_environment,
    ddplaunch_command,
    free_port,
    is_alive,
    run_command,
    wait_until,
    write_program,
)
from tests.debugger_fixtures import AT, STEPS, TAKEN_OVER, debug_socket, pipe_to_debugger, wait_for_stops
from tests.debugger_fixtures import debug_job as debug_job
from tests.debugger_fixtures import debug_terminal as debug_terminal
from tests.debugger_fixtures import runtime_dir as runtime_dir
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import EXEC, LIGHT
from tests.terminal_emulator import TerminalEmulator

pytestmark = pytest.mark.slow

NESTED = """
import os

def inner(n):
    breakpoint()
    return n * 7

def step():
    loss = 6
    breakpoint()
    return loss

print("loss", step(), flush=True)
if os.environ.get("FAILS"):
    1 / 0
"""


WORKS = """
import os, time

def work(file="over"):
    while not os.path.exists(file):
        time.sleep(0.01)

if os.environ["RANK"] == "1":
    breakpoint()
    work()
    print("worked", flush=True)
"""


def test_a_breakpoint_in_what_the_debugger_evaluates(debug_job, tmp_path):
    """As in plain pdb it is passed over, but below its `debug`, where it has a prompt of its own."""
    job = debug_job(NESTED, how=EXEC)
    wait_for_stops(job, 2)
    lines = "p inner(loss)\ninteract\ninner(2)\n\x04\ndebug inner(3)\nc\np n\nw\nc\np loss\n@all detach\n"
    done = pipe_to_debugger(tmp_path, lines, "demo")
    assert re.search(r"\(rank \d\) p inner\(loss\)\n42\n", done.stdout), done.stdout
    assert re.search(r"\(\(rank \d\)\) p n\n3\n", done.stdout), done.stdout
    assert re.search(r"\(rank \d\) p loss\n6\n", done.stdout), done.stdout
    assert job.wait() == 0
    assert job.stdout().count("loss 6") == 2


def test_a_breakpoint_in_what_is_evaluated_after_a_failure(debug_job, tmp_path):
    program = NESTED.replace("    breakpoint()\n    return loss", "    return loss")
    job = debug_job(program, options=("--post-mortem",), env={"FAILS": "1"})
    done = pipe_to_debugger(tmp_path, "p inner(5)\nn\np n\nc\np 40 + 4\nq\n", "demo")
    assert re.search(r"\(\(rank \d\)\) p n\n5\n", done.stdout), done.stdout
    assert re.search(r"\(rank \d\) p 40 \+ 4\n44\n", done.stdout), done.stdout
    assert job.wait() == 1
    assert "ZeroDivisionError" in job.stderr()


def frame(message):
    body = json.dumps(message).encode()
    return struct.pack("!I", len(body)) + body


@contextmanager
def attached(awaited: bytes = b"") -> Iterator[socket.socket]:
    """A client of the test that has got the message of a stopped rank, or more."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(scaled_timeout(10))
        client.connect(debug_socket())
        client.sendall(frame({"op": "DebugRanks", "columns": 80, "rows": 24}))
        found = client.recv(1 << 16)
        while awaited not in found:
            found += client.recv(1 << 16)
        yield client


def test_time_limits_run_again_when_a_client_is_killed_while_a_rank_steps(debug_job, debug_terminal):
    job = debug_job(WORKS, options=("--debug", "--timeout", f"{scaled_timeout(3):.0f}"))
    each = debug_terminal("debug", "demo")
    for _ in range(2 if AT == 10 else 1):  # pdb may have stopped at breakpoint() itself
        each.until(lambda each: each.rows[-1:] == ["(rank 1)"])
        each.type("n\r")
        each.until(lambda each: each.rows[-1:] != ["(rank 1)"])
    each.process.kill()
    assert job.wait() == 124
    assert "expired" in job.stderr()


def test_time_limits_run_again_when_a_client_goes_in_the_moment_in_which_a_rank_steps(debug_job):
    """Its line has gone to the rank, which has not reported yet that it steps."""
    job = debug_job(WORKS, options=("--debug", "--timeout", f"{scaled_timeout(3):.0f}"))
    wait_for_stops(job)
    with attached(b64encode(b"(rank 1) ")) as client:
        client.sendall(frame({"op": "KeyInput", "data": b64encode(b"n\r").decode()}))
    assert job.wait() == 124
    assert "expired" in job.stderr()


def test_a_step_that_outlasts_its_client_stops_nowhere(debug_job, tmp_path):
    job = debug_job(WORKS + "    work()\n    breakpoint()\n    print('again', flush=True)\n")
    client = TerminalEmulator(ddplaunch_command("debug", "demo"), tmp_path)
    client.until(lambda each: each.rows[-1:] == ["(rank 1)"])
    client.type("n\r" * (2 if AT == 10 else 1))
    client.until(lambda each: each.rows[-1:] != ["(rank 1)"])
    client.close()
    write_program(tmp_path, "over", "")
    assert job.wait() == 0
    assert job.stdout().count("again") == 1
    assert job.stderr().count("is at a breakpoint") == 1


def test_a_rank_that_is_to_resume_can_be_stopped_again(debug_job, tmp_path):
    """It is still busy for a client that has left. The next client waits, though its input has ended."""
    job = debug_job(WORKS)
    wait_for_stops(job)
    with attached(b64encode(b"(rank 1) ")) as client:
        client.sendall(keys(b"work('begun')\r"))
    command = ddplaunch_command("debug", "demo", "--rank", "1")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=clean_environment({}), **pipes) as second:
        second.stdin.write("p 6 * 7\n")
        second.stdin.close()
        assert run_command(ddplaunch_command("stacks", "demo"), tmp_path).returncode == 0
        wait_until(lambda: psutil.Process(second.pid).status() == psutil.STATUS_SLEEPING, "the second client to wait")
        write_program(tmp_path, "begun", "")
        assert "(rank 1) p 6 * 7\n42\n" in second.stdout.read()
    assert second.returncode == 0
    write_program(tmp_path, "over", "")
    assert job.wait() == 0, job.stderr()


def test_a_long_line_works_and_a_too_long_one_is_refused(debug_job, debug_terminal, tmp_path):
    """Typed, a read of the terminal ends within a character."""
    job = debug_job(STEPS, "1")
    each = debug_terminal("debug", "demo")
    each.until(lambda each: each.rows[-1:] == ["(rank 1)"])
    each.type(f"p len('{'é' * 700}')\r")
    each.until(lambda each: "700" in each.rows)
    long = f"p len('{'é' * 4200}')"
    lines = f"{long}\np '{'x' * 70_000}'\np 'é' * 200_000\np 6 * 7\n"
    output = pipe_to_debugger(tmp_path, lines, "demo").stdout
    assert "\n4200\n" in output
    assert "é" * 200_000 in output
    assert "ddplaunch: not sent: this line has 70,004 characters, of 65,536\n" in output
    assert "(rank 1) p 6 * 7\n42\n" in output
    each.until(TAKEN_OVER)
    each.type("\x03")
    assert job.wait() == 0


def test_what_a_prompt_and_a_place_may_hold(debug_job, tmp_path):
    """A prompt that the program has printed itself, and a file whose name is no UTF-8."""
    (tmp_path / "other.py").write_text("import os\nexec(compile('def stop():\\n breakpoint()\\n return 1\\n', "
                                       "os.fsdecode(b'o\\xff.py'), 'exec'))\n")  # fmt: skip
    job = debug_job(STEPS.replace("breakpoint()", "__import__('other').stop()"), "1")
    printed = ("'y' * 9000", "'\\x1b[31m'", "'\\r'", "'\\udcff'")
    done = pipe_to_debugger(tmp_path, "".join(f"!print({each}, end='')\n" for each in printed) + "p 6 * 7\n", "demo")
    assert "42\n" in done.stdout, done.stdout
    assert done.stdout.count("y") >= 9000
    assert job.wait() == 0
    assert "is at a breakpoint: o" in job.stderr()


def test_who_only_asks_for_pdb_finds_it_as_it_is_and_the_rank_still_stops(debug_job, tmp_path):
    """As programs do that ask whether IPython is there; the second question is that of ``python -m pdb``."""
    asks = "import importlib.util as u\nassert u.find_spec('pdb').loader.get_code('pdb')\n"
    job = debug_job(asks + STEPS.replace("breakpoint()", "import pdb; pdb.set_trace()"), "1")
    assert "(rank 1) p 6 * 7\n42\n" in pipe_to_debugger(tmp_path, "p 6 * 7\n", "demo").stdout
    assert job.wait() == 0, job.stderr()


PLAYS = """
import json, os, socket, struct, sys

def say(op, **fields):
    body = json.dumps({"op": op, "rank": 1, **fields}).encode()
    talk.sendall(struct.pack("!I", len(body)) + body)

def receive():
    size, = struct.unpack("!I", talk.recv(4, socket.MSG_WAITALL))
    return json.loads(talk.recv(size, socket.MSG_WAITALL))

if os.environ["RANK"] == "1":
    talk = socket.socket(socket.AF_UNIX)
    os.chdir(os.path.dirname(sys.breakpointhook.__self__._path))  # the path may be too long
    talk.connect("debugger")
    say("RankStopped", file="train.py", line=1, function="")
    while receive()["op"] != "DetachUser":
        pass
    say("RankResumed", is_stepping=True)
    say("TerminalRequest")
    path = receive()["path"]
    say("RankStopped", file="train.py", line=2, function="", tool="pudb")
    print(receive()["op"], "of", os.path.basename(os.path.dirname(path)), flush=True)
    say("RankResumed")
"""


def test_a_rank_that_stops_as_its_user_leaves_is_announced_again(debug_job):
    """A rank looks for what the launcher says just before it asks at its terminal: here it comes just after."""
    job = debug_job(PLAYS)
    wait_for_stops(job)
    with attached():
        pass
    assert job.wait() == 0
    assert "DetachUser of pts" in job.stdout()


def test_a_rank_whose_user_leaves_as_it_asks_for_a_terminal_does_not_stop(tmp_path):
    with socket.socket(socket.AF_UNIX) as launcher:
        launcher.bind(str(tmp_path / "talk"))
        launcher.listen()
        talk = DebugConnection(str(tmp_path / "talk"), 1)
        assert talk.connect()
        connection = launcher.accept()[0]
        connection.sendall(frame({"op": "DetachUser", "rank": 1}))
        connection.sendall(frame({"op": "TerminalRequest", "rank": 1, "path": "/dev/tty"}))
        assert talk.request_terminal() == ""
        connection.close()


NONSENSE = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x00\x00\x00\x05{nope",
    {"op": "LineInput", "rank": 1, "line": "q"},
    {"op": "KeyInput", "data": 4},
    {"op": "KeyInput", "data": "no base64"},
    {"op": "TerminalResized", "columns": -1, "rows": 24},
    {"op": "CompletionRequest", "rank": 1, "line": "p lo\udcff"},
    {"op": "DetachUser", "rank": 1},
    b"\x7f\xff\xff\xff",
)


def test_clients_that_send_nonsense_do_no_harm(debug_job, tmp_path):
    """Each is dropped, and as with any client that goes, the rank runs on."""
    job = debug_job(
        "import os, time\nwhile not os.path.exists('over'):\n"
        "    if os.environ['RANK'] == '1':\n        breakpoint()\n    time.sleep(0.01)\n"
    )
    wait_for_stops(job)
    for nonsense in NONSENSE:
        with attached() as client:
            client.sendall(nonsense if isinstance(nonsense, bytes) else frame(nonsense))
            try:
                client.sendall(b"\xff\xff\xff\xff")  # where the first was only passed over
                while client.recv(1 << 16):
                    pass
            except (ConnectionResetError, BrokenPipeError):
                pass
    assert "Traceback" not in job.stderr()
    assert "(rank 1) p 6 * 7\n42\n" in pipe_to_debugger(tmp_path, "p 6 * 7\n", "demo").stdout
    write_program(tmp_path, "over", "")
    assert job.wait() == 0, job.stderr()


def keys(text):
    return frame({"op": "KeyInput", "data": b64encode(text).decode()})


ATTACKS = {
    "input without waiting": keys(b"p 1\r\x1b[A\x1b[D" * 1500) * 100,
    "a long line, edited at its start": keys(b"x" * 16_000) + keys(b"\x01" + b"y\x1b[C\x1b[D" * 2000),
    "ranks to parse": keys(b"@" + b" " * 12_000 + b"\r" + b"@1" + b",0-1" * 900 + b" p 1\r"),
    "errors to show": keys(b"@7\r" * 5000),
    "sizes": b"".join(frame({"op": "TerminalResized", "columns": n % 90, "rows": 24}) for n in range(40_000)),
    "more output than it reads": keys(b"p 'z' * 70_000_000\r"),
}


def test_a_client_that_sends_much_or_reads_nothing_does_not_hold_up_others(debug_job, tmp_path):
    """The launcher answers others meanwhile, and takes no more than it can keep."""
    job = debug_job(
        "import os, time\nwhile not os.path.exists('over'):\n"
        "    if os.environ['RANK'] == '1':\n        breakpoint()\n    time.sleep(0.01)\n"
    )
    wait_for_stops(job)
    for attack, data in ATTACKS.items():
        with attached(b64encode(b"(rank 1) ")) as client:
            client.sendall(data)
            slowest = 0.0
            for _ in range(20):
                begin = time.monotonic()
                send_request(debug_socket(), StatusQuery())
                slowest = max(slowest, time.monotonic() - begin)
            assert slowest < scaled_timeout(0.5), attack
            if attack in ("input without waiting", "more output than it reads"):
                poll = select.poll()
                poll.register(client, select.POLLRDHUP)
                wait_until(lambda poll=poll: poll.poll(0), f"the end of this client ({attack})")
    assert "(rank 1) p 6 * 7\n42\n" in pipe_to_debugger(tmp_path, "p 6 * 7\n", "demo").stdout
    memory = Path(f"/proc/{job.process.pid}/status").read_text()
    assert int(re.search(r"VmHWM:\s+(\d+)", memory)[1]) < 300_000, memory
    write_program(tmp_path, "over", "")
    assert job.wait() == 0, job.stderr()
    assert "Traceback" not in job.stderr()


def test_two_clients_at_once(debug_job, debug_terminal):
    """Who came last is asked; when they leave, the ranks run on, and the one before is asked at the next stop."""
    job = debug_job(STEPS.replace("range(2)", "range(3)"), "1")
    first = debug_terminal("debug", "demo")
    first.until(lambda each: each.rows[-1:] == ["(rank 1)"])
    second = debug_terminal("debug", "demo")
    second.until(lambda each: each.rows[-1:] == ["(rank 1)"])
    first.until(TAKEN_OVER)
    first.type("p 1\r")
    second.type("p 2 + 3\r")
    second.until("5")
    second.process.kill()
    assert job.wait() == 0
    first.until("the job has ended")
    assert first.end() == 0
    assert not any("p 1" in row for row in second.history)


def test_a_suspended_client_while_a_rank_prints_ten_megabytes(debug_job, tmp_path):
    """The job goes on as fast as ever, and the client has all of it when it goes on."""
    job = debug_job(STEPS, "1")
    wait_for_stops(job)
    with (tmp_path / "said").open("wb") as output:
        client = subprocess.Popen(
            ddplaunch_command("debug", "demo"),
            cwd=tmp_path,
            env=clean_environment({}),
            stdin=subprocess.PIPE,
            stdout=output,
        )
    assert client.stdin
    wait_until(lambda: b"(rank 1)" in (tmp_path / "said").read_bytes() or client.stdin.write(b"p 6 * 7\n")
               or client.stdin.flush(), "the prompt")  # fmt: skip
    client.stdin.write(b"!open('begun', 'w').close()\np 'z' * 10_000_000\n!open('ended', 'w').close()\n")
    client.stdin.flush()
    wait_until((tmp_path / "begun").exists, "the print")
    client.send_signal(signal.SIGSTOP)
    done = run_command(ddplaunch_command("stacks", "demo"), timeout=30)
    assert done.returncode == 0, done.stderr
    client.send_signal(signal.SIGCONT)
    client.stdin.close()
    assert client.wait(scaled_timeout(30)) == 0
    assert (tmp_path / "said").read_bytes().count(b"z") >= 10_000_000
    assert job.wait() == 0


def test_nothing_stays_of_a_parked_rank_when_its_launcher_is_killed(debug_job):
    job = debug_job(STEPS, "0", "1")
    wait_for_stops(job, 2)
    client = subprocess.Popen(
        ddplaunch_command("debug", "demo"), env=clean_environment({}), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdout
    assert client.stdin
    client.stdout.readline()
    job.signal(signal.SIGKILL)
    job.process.wait()
    job.assert_nothing_left()
    client.stdin.close()
    assert client.wait(scaled_timeout(30)) == 0
    client.stdout.close()


def test_a_parked_rank_that_is_killed_and_one_that_is_started_again(debug_job, tmp_path):
    job = debug_job(STEPS, "0", "1", options=("--debug", "--max-restarts", "1", "--grace", "1"))
    wait_for_stops(job, 2)
    before = job.ranks()
    os.kill(before[1], signal.SIGKILL)
    wait_for_stops(job, 4)
    assert not any(map(is_alive, before))
    done = pipe_to_debugger(tmp_path, "@all p rank * 3 + 1\n@all detach\n", "demo")
    assert "rank 0: 1\nrank 1: 4\n" in done.stdout
    assert job.wait() == 0
    job.assert_nothing_left()


def test_a_rank_of_another_node_is_named_with_the_node(start_ddplaunch, tmp_path, runtime_dir):
    """Each launcher but node 0's knows only its own ranks: their numbers are not its own ranks' places."""
    write_program(tmp_path, "train.py", STEPS + "import time\nwhile not os.path.exists('over'): time.sleep(0.01)\n")
    shared = ("--debug", "--nnodes", "2", "--nproc", "2,1", "--master-addr", "127.0.0.1")
    shared = (*shared, "--master-port", str(free_port()), "--run-id", "demo")
    jobs = [start_ddplaunch("run", *shared, "--node-rank", number, *LIGHT, "train.py") for number in "01"]
    for job in jobs:
        job.wait_for("loss", 2)
    for node, rank, theirs in ((1, 0, 0), (1, 1, 0), (0, 2, 1)):
        done = pipe_to_debugger(tmp_path, "", str(jobs[node].process.pid), "--rank", str(rank))
        assert done.returncode == 2, done.stdout + done.stderr
        assert f"rank {rank} is on another node: run `ddplaunch debug demo --rank {rank}` on " in done.stdout, theirs
    for rank in ("3", "9"):
        refused = pipe_to_debugger(tmp_path, "", str(jobs[1].process.pid), "--rank", rank)
        assert (refused.returncode, f"there is no rank {rank}: this job has ranks 0 to 2" in refused.stdout) == (
            2,
            True,
        )
    write_program(tmp_path, "over", "")
    assert [job.wait() for job in jobs] == [0, 0]
    assert "Traceback" not in jobs[1].stderr()
