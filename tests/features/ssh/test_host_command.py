"""Tests of commands for a job over SSH on the machine where it was started, with a stand-in for ssh."""

import json
import os
import signal
import sys
import tempfile
from textwrap import dedent

import pytest

from tests.conftest import NEWEST, run_command, write_program
from tests.start_modes import LIGHT

pytestmark = pytest.mark.slow

SSH = """
    #!/bin/sh
    # Reaches "hosts" that share this machine's kernel, and neither its history nor its sockets.
    [ "$1" = -G ] && { echo "hostname 127.0.0.1"; exit; }
    while [ "$1" != -- ]; do shift; done
    echo "$2" >> "$FAR/asked"
    [ "$2" != down ] || { echo "ssh: connect to host down: No route to host" >&2; exit 255; }
    export XDG_STATE_HOME="$FAR/state" XDG_RUNTIME_DIR="$SOCKETS" TMPDIR="$FAR"
    exec sh -c "$3"
    """

STOP = """
    # Of the jobs on this machine only these: those of virtual hosts are seen too, by their folder in /tmp.
    import sys
    from ddplaunch.cli.lookup import running_jobs
    from ddplaunch.cli import run_command_line
    list_all, pids = running_jobs.list_running, sys.argv.pop(1).split(",")
    running_jobs.list_running = lambda: [each for each in list_all() if str(each.pid) in pids]
    sys.exit(run_command_line())
    """

WAITS = """
    import os, sys, time
    print("ready", flush=True)
    while not os.path.exists("over"):
        time.sleep(0.01)
    sys.exit(3)
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "far").mkdir(mode=0o700)
    write_program(tmp_path, "bin/ssh", SSH).chmod(0o755)
    write_program(tmp_path, "train.py", WAITS)
    return tmp_path


@pytest.fixture
def environment(place):
    with tempfile.TemporaryDirectory(prefix="far-", dir="/tmp") as sockets:  # their paths are short
        own = {"XDG_STATE_HOME": str(place / "state"), "FAR": str(place / "far"), "SOCKETS": sockets}
        yield {**own, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}


@pytest.fixture
def ask(run_in_fork, environment):
    """Run a command where hosts are reached by the stand-in for ssh."""
    return lambda *words: run_in_fork(*words, env=environment)


@pytest.mark.ci
def test_commands_go_to_the_first_host(start_ddplaunch, run_ddplaunch, ask, place, environment):
    def rows():
        return [row for row in json.loads(ask("ps", "--json").stdout) if row["run"] == "demo"]

    job = start_ddplaunch("run", "--hosts", "n1:2", "--run-id", "demo", *LIGHT, "train.py", env=environment)
    job.wait_for("ready", 2)
    (row,) = rows()
    assert (row["run"], row["state"], row["pid"], row["hosts"]) == ("demo", "running", job.process.pid, ["n1"])
    page = [line.split() for line in ask("ps").stdout.splitlines()]
    assert ["RUN", "STATE", "BEGAN", "HOSTS", "TARGET"] in page
    assert [["running"], ["n1", "train.py"]] in [[line[1:2], line[-2:]] for line in page if line[:1] == ["demo"]]
    for word in ("demo", str(job.process.pid)):
        done = ask("stacks", word)
        assert done.returncode == 0, done.stderr
        assert "train.py:4" in done.stdout
        assert done.stderr == "ddplaunch: demo runs on n1; connecting to n1 over SSH\n"
    assert "running: 2 ranks" in ask("top", "dem").stdout
    newest = ask("logs", "--rank", "1")
    assert newest.stdout == "ready\n"
    assert newest.stderr == f"{NEWEST}: demo\nddplaunch: demo runs on n1; connecting to n1 over SSH\n"
    refused = ask("report", "demo", "--html", "page.html")
    assert refused.returncode == 2
    assert "demo runs on n1: run the command with --html there" in refused.stderr
    assert "ssh n1 ddplaunch report demo --html page.html" in refused.stderr
    (place / "over").touch()
    assert job.wait() == 3, job.stderr()
    (row,) = rows()
    assert (row["state"], row["code"]) == ("failed", 3)
    for words in (["report", "demo"], ["report"]):
        report = ask(*words)
        assert report.returncode == 0, report.stderr
        assert "demo: failed with exit code 3" in report.stdout
    assert ask("wait").returncode == 3
    assert run_ddplaunch("run", "--run-id", "later", *LIGHT, "train.py", env=environment).returncode == 3
    assert "later: failed with exit code 3" in ask("report").stdout, "the newest of both"
    assert ask("clean", "--yes").returncode == 0
    assert rows() == []


@pytest.mark.ci
def test_stop_ends_the_jobs_from_where_they_were_started(start_ddplaunch, place, environment):
    """``stop`` ends one job by its name; with --all it ends two over SSH, and one of this machine."""

    def start(name, *words):
        typed = ("run", *words, "--run-id", name, "--no-history", *LIGHT, "train.py")
        return start_ddplaunch(*typed, env=environment)

    def stop(word):
        pids = ",".join(str(job.process.pid) for job in jobs.values())
        words = [sys.executable, "-c", dedent(STOP), pids, "stop", word]
        return run_command(words, place, environment)

    far = ("--hosts", "n1:1")
    jobs = {"brief": start("brief", *far), "one": start("one", *far), "two": start("two", *far), "here": start("here")}
    for job in jobs.values():
        job.wait_for("ready")
    for word, names in (("brief", ["brief"]), ("--all", ["one", "two", "here"])):
        done = stop(word)
        assert done.returncode == 0, done.stderr
        for name in names:
            assert f"{name} has ended" in done.stderr
            assert jobs[name].wait() == 128 + signal.SIGINT, jobs[name].stderr()
    assert "no runs in progress" in stop("--all").stderr
    assert not list((place / "state" / "ddplaunch" / "over-ssh").iterdir())  # --no-history


def test_a_host_that_ssh_does_not_reach_is_named_with_what_to_type(ask, place):
    folder = place / "state" / "ddplaunch" / "over-ssh"
    folder.mkdir(parents=True, mode=0o700)
    (place / "state" / "ddplaunch").chmod(0o700)
    job = {"run_id": "distant", "hosts": ["down", "n2"], "python": sys.executable, "target": "train.py", "cwd": "/",
           "pid": 1, "ticks": None, "host": "another", "began": 0.0}  # fmt: skip
    (folder / "distant.another.1.json").write_text(json.dumps(job))
    done = ask("stacks", "distant", "--json")
    assert done.returncode == 69
    assert "distant runs on down, n2; connecting to down over SSH" in done.stderr
    assert "log in there and run: ssh down ddplaunch stacks distant --json" in done.stderr
    again = ask("rerun", "distant")  # recorded by an earlier version
    assert again.returncode == 2
    assert "type it again: ddplaunch run --hosts down,n2 OPTIONS train.py" in again.stderr


@pytest.mark.ci
def test_rerun_starts_a_job_over_ssh_again(run_ddplaunch, ask, place, environment):
    (place / "over").touch()
    words = ("run", "--hosts", "n1:1", "--run-id", "far", *LIGHT, "train.py", "--lr", "0.1")
    assert run_ddplaunch(*words, env=environment).returncode == 3
    done = ask("rerun", "far", "--lr", "0.2")
    assert done.returncode == 3, done.stderr
    assert done.stdout == "ready\n"
    typed = f"ddplaunch run --hosts n1:1 --run-id far {' '.join(LIGHT)} train.py --lr 0.2"
    assert f"ddplaunch: {typed}\nddplaunch: in {place}\n" in done.stderr
