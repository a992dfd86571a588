"""Tests of ``--notify``: its commands get each event, and their failures do not change the job's result."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace as Namespace
from typing import Any, cast

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.features.notify import node
from ddplaunch.features.notify.feature import FEATURE
from ddplaunch.features.notify.options import Notifications
from ddplaunch.features.notify.rank import notifier
from tests.conftest import is_alive, wait_until, write_program
from tests.start_modes import LIGHT

pytestmark = pytest.mark.slow

TO_FILE = "sh -c 'cat >> notified'"
FAILS = """
import os
if os.environ["RANK"] == "1":
    raise ValueError("no luck")
"""


def read_notified(tmp_path):
    return [json.loads(line) for line in (tmp_path / "notified").read_text().splitlines()]


def python(tmp_path, text):
    return shlex.join([sys.executable, str(write_program(tmp_path, "command.py", text))])


@pytest.mark.parametrize("node_rank", [0, 1])
def test_only_node_0_runs_the_commands(node_rank):
    """On other nodes they need not exist."""
    options = cast("Any", {Notifications: Notifications(("nosuch -x",))})
    plan = cast("Any", Namespace(node_rank=node_rank))
    with pytest.raises(UsageError, match="program nosuch not found") if node_rank == 0 else nullcontext():
        FEATURE.check(options, plan)
    context = cast("Any", Namespace(options={Notifications: Notifications(("true",))}, plan=plan))
    described = FEATURE.describe(context.options, plan, is_remote=False)
    assert described == ["notified of events: true"] * (node_rank == 0)
    if node_rank:
        assert FEATURE.make_node_side(context) is None


def test_the_last_note_reaches_a_slow_terminal():
    loop: Any = Namespace(drained=[False, False, True], call_later=lambda *_: Namespace(cancel=lambda: None))
    loop.run_once = lambda: loop.drained.pop(0)
    screen = type("Screen", (), {"is_drained": property(lambda self: loop.drained[0]), "show_note": None})()
    node.NotifyObserver(cast("Any", Namespace(loop=loop, plan=None, tree=None, screen=screen)), ()).finish()
    assert loop.drained == [True]


@pytest.mark.smoke
def test_each_event_runs_the_command_once(run_ddplaunch, tmp_path):
    write_program(tmp_path, "t.py", FAILS)
    job = run_ddplaunch("run", "--nproc", "2", *LIGHT, "--max-restarts", "1", "--notify", TO_FILE, "t.py")
    assert job.returncode == 1
    found = read_notified(tmp_path)
    assert [each["event"] for each in found] == ["starts", "fails", "restarts", "fails", "ends"]
    _, first, again, second, end = found
    assert first["text"] == "rank 1 failed with ValueError: no luck (exit code 1)"
    assert (first["rank"], first["exit_code"], first["attempt"], second["attempt"]) == (1, 1, 0, 1)
    assert first["traceback"][-1] == "ValueError: no luck"
    assert (again["text"], again["next_attempt"]) == ("restart 1 of 1", 1)
    assert (end["code"], end["world_size"]) == (1, 2)


def test_a_failed_command_is_reported_once_and_its_children_are_killed(run_ddplaunch, tmp_path):
    write_program(tmp_path, "t.py", "")
    command = "setsid sleep 600 & echo $! >> pids; yes | head -c 9000000; echo; echo no mail here; exit 3"
    job = run_ddplaunch("run", "--notify", shlex.join(["sh", "-c", command]), "t.py")
    assert (job.returncode, job.stderr.count("--notify")) == (0, 1)
    assert "exited with code 3: no mail here; the job continues" in job.stderr
    assert not any(is_alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_the_helper_process_reports_why_commands_failed(tmp_path):
    """One that cannot be started, one that fails, one whose output is cut off, one that takes too long."""
    write_program(tmp_path, "odd", "#!/none/sh\n").chmod(0o755)
    scripts = "cat", "echo why; echo; exit 3", "cat >&2; kill -9 $$", "echo slow; exec sleep 600"
    commands = [[str(tmp_path / "odd"), "odd"], *(["/bin/sh", "sh", "-c", script] for script in scripts)]
    ours, theirs = socket.socketpair()
    words = [sys.executable, notifier.__file__, str(theirs.fileno()), json.dumps(commands), "0.5"]
    helper = subprocess.Popen(words, pass_fds=[theirs.fileno()])
    theirs.close()
    with ours, ours.makefile("rb") as replies:
        ours.sendall(b"an event\n")
        ended = [[0, 126, "No such file or directory"], [2, 3, "why"], [3, -9, "an event"], [4, None, "slow"]]
        assert json.loads(replies.readline()) == ended
        ours.sendall(b"x" * 70_000 + b"\n")
        assert [each[2] for each in json.loads(replies.readline())] == ["the event is too large for a pipe"] * 5
    assert helper.wait(20) == 0


IGNORES_SIGTERM = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_DFL)
open("pid", "w").write(str(os.getpid()))
time.sleep(600)
"""


def wait_for_pid(tmp_path):
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the command")
    return int((tmp_path / "pid").read_text())


@pytest.mark.ci
def test_the_job_waits_for_a_command_for_a_bounded_time(run_ddplaunch, tmp_path):
    write_program(tmp_path, "t.py", "")
    began = time.monotonic()
    job = run_ddplaunch("run", "--notify", python(tmp_path, IGNORES_SIGTERM), "t.py")
    assert job.returncode == 0
    late = f"{node.FINAL_TIMEOUT_S:g} s after the end of the job"
    assert f"--notify: killed commands that were still running {late}" in job.stderr
    assert time.monotonic() - began >= node.FINAL_TIMEOUT_S
    assert not is_alive(wait_for_pid(tmp_path))


def test_a_launcher_that_is_killed_leaves_no_command(start_ddplaunch, tmp_path):
    write_program(tmp_path, "t.py", "import time; time.sleep(600)")
    job = start_ddplaunch("run", "--notify", python(tmp_path, IGNORES_SIGTERM), "t.py")
    command = wait_for_pid(tmp_path)
    job.signal(signal.SIGKILL)
    job.wait()
    wait_until(lambda: not is_alive(command), "the end of the command")
    job.assert_nothing_left()


def test_a_second_ctrl_c_ends_the_wait_for_a_command(start_ddplaunch, tmp_path):
    write_program(tmp_path, "t.py", "import time; print('ready', flush=True); time.sleep(600)")
    job = start_ddplaunch("run", "--notify", python(tmp_path, IGNORES_SIGTERM), "t.py", start_new_session=True)
    command = wait_for_pid(tmp_path)
    job.wait_for("ready")
    os.killpg(job.process.pid, signal.SIGINT)
    wait_until(lambda: "ended with exit code 130" in job.stderr() or "stopping" in job.stderr(), "the end of the rank")
    assert is_alive(command)
    wait_until(lambda: job.signal(signal.SIGINT) or job.process.poll() is not None, "the end of the launcher")
    assert job.wait() == 130
    wait_until(lambda: not is_alive(command), "the end of the command")
    job.assert_nothing_left()


@pytest.mark.slow
def test_a_signal_during_a_command_does_not_change_the_exit_code(start_ddplaunch, tmp_path):
    """It was reported by then: here that lines of the output are lost."""
    write_program(tmp_path, "t.py", "print('lost')\n")
    with open("/dev/full", "wb") as full:
        command = shlex.join(["sh", "-c", "if grep -q ends; then touch ends; exec sleep 600; fi"])
        job = start_ddplaunch("run", "--nproc", "2", *LIGHT, "--notify", command, "t.py", stdout=full)
    wait_until((tmp_path / "ends").exists, "the command")
    wait_until(lambda: job.signal(signal.SIGTERM) or job.process.poll() is not None, "the end of the launcher")
    assert job.wait() == 74, job.stderr()
    job.assert_nothing_left()


def test_a_killed_helper_process_disables_the_option(start_ddplaunch, tmp_path):
    write_program(tmp_path, "t.py", "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)")
    job = start_ddplaunch("run", "--notify", python(tmp_path, IGNORES_SIGTERM), "t.py")
    command = wait_for_pid(tmp_path)
    with open(f"/proc/{command}/stat") as file:
        os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
    wait_until(lambda: "--notify disabled" in job.stderr(), "the message")
    (tmp_path / "go").touch()
    assert job.wait() == 0
    assert not is_alive(command)
