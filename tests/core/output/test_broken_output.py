"""Tests of output that cannot be written: the exit code stays the job's, and lost lines are counted."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import resource
import signal
import subprocess

import pytest

from ddplaunch.core.events import NoteAdded
from ddplaunch.core.output.run_log import RunLog
from tests.conftest import clean_environment, ddplaunch_command, run_command, wait_until, write_program
from tests.constant_override import launcher_with_constant, write_launcher
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import LIGHT

SEVEN = """
import os, sys, time
rank = os.environ["RANK"]
while rank == "1" and not os.path.exists("printed"):  # else rank 0 may be stopped before it has printed
    time.sleep(0.01)
print("line", rank, flush=True)
open("printed", "w").close()
sys.exit(7 if rank == "1" else 0)
"""


@pytest.mark.parametrize("output", ["2>/dev/full", "2>&1 | true", ">/dev/full 2>&1"])
def test_unwritable_output_keeps_the_jobs_exit_code(tmp_path, output):
    write_program(tmp_path, "seven.py", SEVEN)
    words = ddplaunch_command("run", "--nproc", "2", *LIGHT, "seven.py")
    short = launcher_with_constant(tmp_path, "core.output.sink.READER_TIMEOUT_S", 0.1)
    script = f'{{ "$@"; echo $? >code; }} {output}'
    words = [str(short), *words[1:]]
    done = run_command(["sh", "-c", script, "sh", *words], tmp_path, {"TMPDIR": str(tmp_path)})
    assert done.stdout + done.stderr in ("", "[0] line 0\n[1] line 1\n", "[1] line 1\n[0] line 0\n")
    assert (tmp_path / "code").read_text() == "7\n"
    assert not [*tmp_path.glob("ddplaunch-bug-*")]


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_terminal_that_closes_ends_the_job_by_its_hangup(tmp_path, nproc):
    script = write_program(
        tmp_path, "waits.py", "import time\nopen(f'up{__import__(\"os\").environ[\"RANK\"]}', 'w')\ntime.sleep(600)\n"
    )
    words = ddplaunch_command("run", "--nproc", str(nproc), *LIGHT, script)
    environ = clean_environment({"TMPDIR": str(tmp_path), "TERM": "xterm-256color"})
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(words[0], words, environ)
    wait_until(lambda: len([*tmp_path.glob("up*")]) == nproc, "the ranks")
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 129
    assert not [*tmp_path.glob("ddplaunch-*")]


def test_lines_lost_to_a_full_disk_are_counted(tmp_path):
    script = write_program(tmp_path, "prints.py", "print('a line')\n")
    words = ddplaunch_command("run", "--nproc", "2", *LIGHT, script)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            words,
            executable=launcher_with_constant(tmp_path, "core.output.sink.READER_TIMEOUT_S", 0.1),
            cwd=tmp_path,
            env=clean_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=scaled_timeout(60),
            text=True,
        )
    assert done.stderr == "ddplaunch: stdout could not be written: 2 lines lost (No space left on device)\n"
    assert done.returncode == 74


@pytest.mark.parametrize("words", [["ps", "--json"], ["run", "--dry-run", "train.py"]])
def test_a_full_disk_is_an_error_of_a_command(tmp_path, words):
    """In an empty history: other records would be noted beside the error."""
    write_program(tmp_path, "train.py", "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            ddplaunch_command(*words),
            cwd=tmp_path,
            env=clean_environment({"XDG_STATE_HOME": str(tmp_path / "state")}),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    error = "Error: cannot write the output: No space left on device\n  free some space, or write elsewhere\n"
    assert (done.returncode, done.stderr.replace("you have no runs in progress on this machine\n", "")) == (74, error)


def test_the_log_folders_of_nodes(tmp_path):
    """A node that joins late uses the folder of the running job, in which node-1 may belong to the replaced node."""
    made = []
    for node_rank, late in ((1, True), (0, False), (0, False), (1, True), (1, True)):
        log = RunLog(str(tmp_path), is_single_node=False)
        for run_id in ("run", "opened once"):
            log.open(run_id, node_rank, late=late)
        made.append(log.path.removeprefix(f"{tmp_path}/"))
    assert made == ["run/node-1", "run/node-0", "run.2/node-0", "run.2/node-1", "run.2/node-1.2"]


def test_a_full_disk_leaves_no_part_of_an_event_in_the_log(tmp_path):
    log = RunLog(str(tmp_path), is_single_node=True)
    log.open("run", 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        for _ in range(2):
            log.observe(NoteAdded("x" * 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.observe(NoteAdded("there is room again"))
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["x" * 1000, "there is room again"]
    assert log.incomplete_note == "the log folder is incomplete: events.jsonl: File too large"


def test_the_last_lines_are_kept_if_the_output_is_not_read(tmp_path):
    """The rank prints them and ends while the launcher reads no pipe, because its own stdout is full."""
    script = write_program(
        tmp_path,
        "prints.py",
        """
        import os, sys, time
        print("the first line", flush=True)
        while not os.path.getsize("logs/run/rank-0.log"):  # until the launcher has read it
            time.sleep(0.01)
        print("the last line", flush=True)
        sys.exit(3)
        """,
    )
    output, stdout = os.pipe()
    os.write(stdout, b"\n" * fcntl.fcntl(stdout, fcntl.F_GETPIPE_SZ))
    process = subprocess.Popen(
        ddplaunch_command("run", *LIGHT, "--log-dir", "logs", "--run-id", "run", script),
        executable=write_launcher(tmp_path, "from ddplaunch.core.output import sink; sink.HIGH_WATER_BYTES = 1"),
        cwd=tmp_path, env=clean_environment(), stdout=stdout, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(stdout)
    failure = tmp_path / "logs/run/failure.json"
    wait_until(lambda: failure.exists() and failure.read_text().endswith("}\n"), "the end of the job", 20)
    with open(output) as file:
        assert file.read().split("\n")[-3:] == ["[0] the first line", "[0] the last line", ""]
    assert process.wait(scaled_timeout(60)) == 3
    assert json.loads(failure.read_text())["first"]["tail"] == ["the first line", "the last line"]
    assert (tmp_path / "logs/run/rank-0.log").read_text() == "the first line\nthe last line\n"


LAST = """
import sys
print("the last line", flush=True)
sys.exit(3)
"""


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "unread"])
def test_a_signal_just_after_the_end_loses_nothing(tmp_path, is_read):
    """A scheduler's SIGTERM comes while the last output waits for its reader, which may never come."""
    script = write_program(tmp_path, "last.py", LAST)
    output, stdout = os.pipe()
    os.write(stdout, b"\n" * fcntl.fcntl(stdout, fcntl.F_GETPIPE_SZ))
    with (tmp_path / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            ddplaunch_command("run", *LIGHT, "--log-dir", "logs", "--run-id", "run", script),
            cwd=tmp_path, env=clean_environment({"DDPLAUNCH_EXIT_FILE": "code"}), stdout=stdout, stderr=stderr,
        )  # fmt: skip
    os.close(stdout)
    failure = tmp_path / "logs/run/failure.json"
    wait_until(lambda: failure.exists() and failure.read_text().endswith("}\n"), "the end of the job", 20)
    process.send_signal(signal.SIGTERM)
    with open(output) as file:
        assert not is_read or file.read().split("\n")[-2:] == ["[0] the last line", ""]
        assert process.wait(scaled_timeout(60)) == 3
    assert (tmp_path / "code").read_text().startswith("3\n")
    assert "rank 0 exited with code 3" in (tmp_path / "stderr").read_text()
