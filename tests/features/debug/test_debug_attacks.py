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
import zipfile
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from ddplaunch.cli.client import send_request
from ddplaunch.core.control_socket.status_request import StatusQuery
from ddplaunch.core.rank.rank_runner import load_private_module
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

rank_debugger = load_private_module("features/debug/rank/rank_debugger")

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


@pytest.mark.ci
def test_a_breakpoint_in_an_evaluated_expression(debug_job, tmp_path):
    """pdb ignores it, as without ddplaunch, except in its command `debug`, where it has a prompt of its own."""
    job = debug_job(NESTED, how=EXEC)
    wait_for_stops(job, 2)
    lines = "p inner(loss)\ninteract\ninner(2)\n\x04\ndebug inner(3)\nc\np n\nw\nc\np loss\n@all detach\n"
    done = pipe_to_debugger(tmp_path, lines, "demo")
    assert re.search(r"\(rank \d\) p inner\(loss\)\n42\n", done.stdout), done.stdout
    assert re.search(r"\(\(rank \d\)\) p n\n3\n", done.stdout), done.stdout
    assert re.search(r"\(rank \d\) p loss\n6\n", done.stdout), done.stdout
    assert job.wait() == 0
    assert job.stdout().count("loss 6") == 2


@pytest.mark.ci
def test_a_breakpoint_in_an_expression_evaluated_after_a_failure(debug_job, tmp_path):
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


@pytest.mark.ci
def test_time_limits_count_again_after_a_client_is_killed_while_a_rank_steps(debug_job, debug_terminal):
    job = debug_job(WORKS, options=("--debug", "--timeout", f"{scaled_timeout(1.5):.1f}"))
    each = debug_terminal("debug", "demo")
    for _ in range(2 if AT == 10 else 1):  # pdb may have stopped at breakpoint() itself
        each.until(lambda each: each.rows[-1:] == ["(rank 1)"])
        each.type("n\r")
        each.until(lambda each: each.rows[-1:] != ["(rank 1)"])
    each.process.kill()
    assert job.wait() == 124
    assert "expired" in job.stderr()


def test_time_limits_count_again_after_a_client_leaves_as_a_rank_begins_to_step(debug_job):
    """The client leaves when the rank has got the line and has not reported yet that it steps."""
    job = debug_job(WORKS, options=("--debug", "--timeout", f"{scaled_timeout(1.5):.1f}"))
    wait_for_stops(job)
    with attached(b64encode(b"(rank 1) ")) as client:
        client.sendall(frame({"op": "KeyInput", "data": b64encode(b"n\r").decode()}))
    assert job.wait() == 124
    assert "expired" in job.stderr()


@pytest.mark.ci
def test_a_step_whose_client_left_does_not_stop(debug_job, tmp_path):
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


@pytest.mark.ci
def test_a_busy_rank_can_be_stopped_again_after_its_client_left(debug_job, tmp_path):
    """The next client waits for the stop, although its input has ended."""
    job = debug_job(WORKS)
    wait_for_stops(job)
    with attached(b64encode(b"(rank 1) ")) as client:
        # It will be in its debugger for half a second longer than it reports.
        find = "next(each for each in __import__('gc').get_objects() if type(each).__name__ == 'DebugConnection')"
        lingers = "'send_resumed', lambda *, steps, send=at.send_resumed: (send(steps=steps), time.sleep(0.5))"
        client.sendall(keys(f"setattr(at := {find}, {lingers}), open('busy', 'w'), work('begun')\r".encode()))
        wait_until((tmp_path / "busy").exists, "the call")
    command = ddplaunch_command("debug", "demo", "--rank", "1")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=clean_environment({}), **pipes) as second:
        second.stdin.write("p 6 * 7\n")
        second.stdin.close()
        try:
            wait_until(lambda: psutil.Process(second.pid).status() == psutil.STATUS_SLEEPING, "the client to wait")
        finally:
            write_program(tmp_path, "begun", "")
        assert "(rank 1) p 6 * 7\n42\n" in second.stdout.read()
    assert second.returncode == 0
    write_program(tmp_path, "over", "")
    assert job.wait() == 0, job.stderr()


@pytest.mark.ci
def test_a_rank_in_a_long_call_stops_in_its_own_code_when_that_returns(debug_job, tmp_path):
    """It does not stop in the signal handlers of an inspection, or of a second client."""
    os.mkfifo(tmp_path / "fifo")
    job = debug_job(
        """
        import os, select
        fifo = os.open("fifo", os.O_RDWR)
        print("ready", flush=True)
        select.select([fifo], [], [])  # every signal interrupts it
        print("over")
        """
    )
    job.wait_for("ready", 2)
    command = ddplaunch_command("debug", "demo", "--rank", "1")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    for is_last in (False, True):
        with subprocess.Popen(command, env=clean_environment({}), **pipes) as client:
            assert "rank 1 has not reached another line yet" in client.stdout.readline()
            if not is_last:
                client.kill()
                continue
            (tmp_path / "fifo").write_text("x")
            client.stdin.close()
            assert client.stdout.readline() == "ddplaunch: rank 1 is at train.py:5\n"
    assert job.wait() == 0


@pytest.mark.ci
def test_a_long_line_works_and_a_too_long_one_is_refused(debug_job, debug_terminal, tmp_path):
    """A read of the terminal may end within a character."""
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


@pytest.mark.ci
def test_odd_output_and_file_names(debug_job, tmp_path):
    """The program prints before the prompt, and its file name is not UTF-8."""
    (tmp_path / "other.py").write_text("import os\nexec(compile('def stop():\\n breakpoint()\\n return 1\\n', "
                                       "os.fsdecode(b'o\\xff.py'), 'exec'))\n")  # fmt: skip
    job = debug_job(STEPS.replace("breakpoint()", "__import__('other').stop()"), "1")
    printed = ("'y' * 9000", "'\\x1b[31m'", "'\\r'", "'\\udcff'")
    done = pipe_to_debugger(tmp_path, "".join(f"!print({each}, end='')\n" for each in printed) + "p 6 * 7\n", "demo")
    assert "42\n" in done.stdout, done.stdout
    assert done.stdout.count("y") >= 9000
    assert job.wait() == 0
    assert "is at a breakpoint: o" in job.stderr()


@pytest.mark.ci
def test_a_program_that_looks_for_pdb_finds_the_real_one(debug_job, tmp_path):
    """Programs check whether IPython is loaded, and ``python -m pdb`` reads the source of pdb."""
    with zipfile.ZipFile(tmp_path / "modules.zip", "w") as archive:  # all its modules have one loader
        archive.writestr("ipdb.py", "def set_trace(): pass\n")
        archive.writestr("other.py", "")
    asks = "import importlib.util as u\nassert u.find_spec('pdb').loader.get_code('pdb')\n"
    asks += "__import__('sys').path.insert(0, 'modules.zip')\nassert u.find_spec('ipdb')\nimport other, ipdb\n"
    job = debug_job(asks + STEPS.replace("breakpoint()", "import pdb; pdb.set_trace()"), "1")
    assert "(rank 1) p 6 * 7\n42\n" in pipe_to_debugger(tmp_path, "p 6 * 7\n", "demo").stdout
    assert job.wait() == 0, job.stderr()


def test_long_output_is_shown_while_it_is_written_and_a_rank_whose_user_leaves_gets_no_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_debugger, "_CHUNK", 10)
    with socket.socket(socket.AF_UNIX) as launcher:
        launcher.bind(str(tmp_path / "connection"))
        launcher.listen()
        connection = rank_debugger.DebugConnection(str(tmp_path / "connection"), 1)
        assert connection.connect()
        with launcher.accept()[0] as accepted:
            connection.write("0123456789")
            with pytest.raises(BlockingIOError):
                accepted.recv(1, socket.MSG_DONTWAIT)
            connection.write("+")
            assert b64encode(b"0123456789") in accepted.recv(1 << 16)
            accepted.sendall(frame({"op": "DetachUser", "rank": 1}))
            accepted.sendall(frame({"op": "TerminalRequest", "rank": 1, "path": "/dev/tty"}))
            assert connection.request_terminal() == ""


MALFORMED = (
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


@pytest.mark.ci
def test_hostile_clients_are_dropped_and_do_not_delay_others(debug_job, tmp_path):
    """The ranks resume after each client, other requests are answered, and the launcher's memory stays bounded."""
    job = debug_job(
        "import os, time\nwhile not os.path.exists('over'):\n"
        "    if os.environ['RANK'] == '1':\n        breakpoint()\n    time.sleep(0.01)\n"
    )
    wait_for_stops(job)
    for message in MALFORMED:
        with attached() as client, suppress(ConnectionResetError, BrokenPipeError):
            client.sendall(message if isinstance(message, bytes) else frame(message))
            client.sendall(b"\xff\xff\xff\xff")  # where the first was only ignored
            while client.recv(1 << 16):
                pass
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


@pytest.mark.ci
def test_two_clients_at_once(debug_job, debug_terminal):
    """The last client has the prompt; after it leaves, the first has it at the next stop."""
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


@pytest.mark.ci
def test_a_suspended_client_while_a_rank_prints_ten_megabytes(debug_job, tmp_path):
    """The job does not wait for the client, which gets all of it once it is continued."""
    job = debug_job(STEPS, "1")
    wait_for_stops(job)
    with (tmp_path / "output").open("wb") as output:
        client = subprocess.Popen(
            ddplaunch_command("debug", "demo"),
            cwd=tmp_path,
            env=clean_environment({}),
            stdin=subprocess.PIPE,
            stdout=output,
        )
    assert client.stdin
    client.stdin.write(b"!open('begun', 'w').close()\np 'z' * 10_000_000\n!open('ended', 'w').close()\n")
    client.stdin.flush()
    wait_until((tmp_path / "begun").exists, "the print")
    client.send_signal(signal.SIGSTOP)
    done = run_command(ddplaunch_command("stacks", "demo"), timeout=30)
    assert done.returncode == 0, done.stderr
    client.send_signal(signal.SIGCONT)
    client.stdin.close()
    assert client.wait(scaled_timeout(30)) == 0
    assert (tmp_path / "output").read_bytes().count(b"z") >= 10_000_000
    assert job.wait() == 0


def test_no_process_is_left_when_a_launcher_is_killed_at_a_breakpoint(debug_job):
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


@pytest.mark.ci
def test_a_rank_killed_at_a_breakpoint_and_its_restart(debug_job, tmp_path):
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


@pytest.mark.ci
def test_a_rank_of_another_node_is_refused_with_the_command_to_use(start_ddplaunch, tmp_path, runtime_dir):
    """A launcher other than node 0's knows only its own ranks, whose numbers do not start at 0."""
    write_program(tmp_path, "train.py", STEPS + "import time\nwhile not os.path.exists('over'): time.sleep(0.01)\n")
    shared = ("--debug", "--nnodes", "2", "--nproc", "2,1", "--master-addr", "127.0.0.1")
    shared = (*shared, "--master-port", str(free_port()), "--run-id", "demo")
    jobs = [start_ddplaunch("run", *shared, "--node-rank", number, *LIGHT, "train.py") for number in "01"]
    for job in jobs:
        job.wait_for("loss", 2)
    for node, rank in ((1, 0), (1, 1), (0, 2)):
        done = pipe_to_debugger(tmp_path, "", str(jobs[node].process.pid), "--rank", str(rank))
        assert done.returncode == 2, done.stdout + done.stderr
        assert f"rank {rank} is on another node: run `ddplaunch debug demo --rank {rank}` on " in done.stdout
    for rank in ("3", "9"):
        refused = pipe_to_debugger(tmp_path, "", str(jobs[1].process.pid), "--rank", rank)
        assert refused.returncode == 2
        assert f"there is no rank {rank}: this job has ranks 0 to 2" in refused.stdout
    write_program(tmp_path, "over", "")
    assert [job.wait() for job in jobs] == [0, 0]
    assert "Traceback" not in jobs[1].stderr()
