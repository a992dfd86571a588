"""Tests of the commands for runs: ps, logs, stop, wait, report, clean."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from ddplaunch.base.errors import host_name
from ddplaunch.base.text import display_width
from ddplaunch.cli import client
from ddplaunch.cli.client import JobNotResponding
from ddplaunch.cli.lookup import queued_jobs, running_jobs
from ddplaunch.cli.lookup.queued_jobs import QueuedJob
from ddplaunch.cli.lookup.running_jobs import RunningJob
from ddplaunch.cli.text_table import short_target
from ddplaunch.core.control_socket.status_request import StatusQuery, StopJobRequest
from ddplaunch.features.runs import rank_logs
from ddplaunch.features.runs import stop as stop_module
from ddplaunch.features.runs.logs import _why_no_output
from ddplaunch.features.runs.output_request import last_lines
from ddplaunch.features.runs.rank_logs import read_last_lines
from ddplaunch.features.runs.stop import stop, wait
from ddplaunch.features.ssh.job_records import RECORDS, SshJob
from ddplaunch.observe.history import history_store
from ddplaunch.observe.history.run_record import RunState
from ddplaunch.system.processes.proc_utils import is_suspended, start_ticks
from ddplaunch.system.schedulers import submitted_jobs
from ddplaunch.system.schedulers.scheduler import BatchJobState, Deadline
from ddplaunch.system.schedulers.submitted_job import SubmittedJob
from tests.conftest import (
    NEWEST,
    clean_environment,
    ddplaunch_command,
    free_port,
    run_command,
    run_in_terminal,
    wait_until,
    write_program,
)
from tests.observe.history.test_history import FAILS, keep
from tests.start_modes import LIGHT

pytestmark = pytest.mark.usefixtures("state")

NAME = "train-7"
"""The run that runs."""

MINE = "mine"
"""A run that has ended."""

WAITS = """
    import os, time
    print("up", os.environ["RANK"], flush=True)
    while True:
        time.sleep(0.02)
        print("on", flush=True)
"""


@pytest.fixture
def running(start_ddplaunch, tmp_path):
    """Two ranks that print for ever, in a run called NAME."""
    write_program(tmp_path, "waits.py", WAITS)

    def begin(*words: str | Path, run_id: str = NAME):
        job = start_ddplaunch("run", "--nproc", "2", "--run-id", run_id, *words, *LIGHT, "waits.py")
        job.wait_for("up", 2)
        if "--no-history" not in words:  # a run whose record is being written has another name for a moment
            wait_until(lambda: job.process.pid in recorded(), "the record of the run")
        return job

    return begin


def recorded() -> list[int]:
    """Return the launchers' pids of all node records."""
    return [each.pid for name in history_store.list_runs() for each in history_store.read_node_records(name)]


def row(out: str, run: str) -> list[str]:
    rows = [line.split() for line in out.splitlines() if line.split()[:1] == [run]]
    assert len(rows) == 1, out
    return rows[0]


def test_ps_and_a_suspended_launcher(running, run_in_fork):
    job = running()
    keep(run_id="before", code=1)
    done = run_in_fork("ps")
    assert row(done.stdout, NAME)[1:2] == ["running"]
    assert row(done.stdout, NAME)[3:6] == ["2", "-", str(job.process.pid)]
    assert row(done.stdout, "before")[1:3] == ["failed", "(1)"]
    found = {each["run"]: each for each in json.loads(run_in_fork("ps", "--json").stdout)}
    assert found[NAME]["state"] == "running"
    assert found[NAME]["ranks"] == [0, 1]
    assert (found["before"]["state"], found["before"]["code"]) == ("failed", 1)
    assert found[NAME].keys() == found["before"].keys()
    job.signal(signal.SIGSTOP)
    try:
        done = run_in_fork("ps")
        shown = row(done.stdout, NAME)
        assert [shown[1], *shown[3:]] == ["suspended", "2", "-", str(job.process.pid), "waits.py"]
        advice = f"continue it with fg in its terminal, or kill -CONT {job.process.pid}\n"
        assert done.stderr.endswith(f"run {NAME} is suspended (PID {job.process.pid}): {advice}")
        assert {each["run"]: each for each in json.loads(run_in_fork("ps", "--json").stdout)}[NAME]["world_size"] == 2
        for words in (("logs", NAME), ("stacks", NAME), ("top", NAME), ("debug", NAME)):
            done = run_in_fork(*words)
            assert (done.returncode, done.stdout) == (69, "")
            assert done.stderr.startswith(f"Error: run {NAME} is suspended (PID {job.process.pid})\n")
            assert done.stderr.endswith(advice)
        report = run_in_fork("report", NAME)
        assert f"{NAME}: running" in report.stdout
        assert advice in report.stderr
        done = run_in_fork("stop", NAME)
        assert done.stderr.startswith(f"{NAME} was suspended: continuing it, so that it can stop\n")
        assert job.process.poll() == 130
    finally:
        job.signal(signal.SIGCONT)


@pytest.mark.ci
def test_two_nodes_of_a_run_on_one_machine(start_ddplaunch, run_in_fork, tmp_path):
    """While it runs, node 0 has the name, and the other its pid; both record their own ranks."""
    write_program(tmp_path, "ends.py", WAITS.replace("while True", "while not os.path.exists('over')"))
    port = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    words = ("--nnodes", "2", "--nproc", "2", *port, "--run-id", NAME, *LIGHT, "ends.py")
    jobs = [start_ddplaunch("run", "--node-rank", rank, *words) for rank in "01"]
    for job in jobs:
        job.wait_for("up", 2)
        wait_until(lambda job=job: job.process.pid in recorded(), "the record of the node")
    first, second = (str(job.process.pid) for job in jobs)
    output = run_in_fork("ps").stdout
    assert row(output, NAME)[5] == first
    assert row(output, f"{NAME}.{second}")[5] == second
    for word in (NAME, first, second):
        done = run_in_fork("stacks", word, "--json")
        assert [rank["rank"] for rank in json.loads(done.stdout)["ranks"]] == [0, 1, 2, 3]
    (tmp_path / "over").touch()
    assert [job.wait() for job in jobs] == [0, 0]
    records = history_store.read_node_records(NAME)
    assert [[each.rank for each in share.attempts[0].ranks] for share in records] == [[0, 1], [2, 3]]
    out = run_in_fork("report", NAME).stdout
    assert "4 ranks on 2 nodes" in out
    assert [row(out.partition("RANK ")[2], str(rank))[0] for rank in range(4)] == ["0", "1", "2", "3"]


def test_ps_shows_the_latest_of_those_that_ended(run_in_fork):
    for number in range(8):
        keep(run_id=f"r{number}")
        os.utime(history_store.run_dir(f"r{number}"), (number, number))
    shown = [line.split()[0] for line in run_in_fork("ps").stdout.splitlines() if line.startswith("r")]
    assert shown == ["r7", "r6", "r5", "r4", "r3"]
    assert len([line for line in run_in_fork("ps", "--all").stdout.splitlines() if line.startswith("r")]) == 8


def test_ps_names_runs_on_other_hosts_of_a_shared_home(run_in_fork):
    for run_id, began in (("far", 100), ("gone", 2 * 86400), ("far-done", 100)):
        keep(run_id=run_id)
        path = Path(history_store.run_dir(run_id)) / "node-0.jsonl"
        head, *lines = path.read_text().splitlines()
        moved = {**json.loads(head), "began": time.time() - began, "host": "node3"}
        kept = lines if run_id == "far-done" else []
        path.write_text("\n".join([json.dumps(moved), *kept, ""]))
    done = run_in_fork("ps")
    assert re.fullmatch(r"1 run on other hosts: far \(node3, seen 1m[45]\ds ago\)\n", done.stderr)
    assert row(done.stdout, "far-done")[1] == "done"
    assert run_in_fork("ps", "--all").stderr.startswith("2 runs on other hosts: ")


def test_ps_names_the_records_that_cannot_be_read(run_in_fork):
    for name in ("whole", "cut", "empty"):
        keep(run_id=name)
    for name, text in (("cut", "{"), ("empty", "")):
        (Path(history_store.run_dir(name)) / "node-0.jsonl").write_text(text)
    done = run_in_fork("ps", "--all")
    assert re.search("^2 records cannot be read: (cut, empty; .* clean cut|empty, cut; .* clean empty)", done.stderr)
    assert "whole" in done.stdout
    assert "cannot be read" not in run_in_fork("ps").stderr


def test_ps_fits_a_terminal_and_is_whole_in_a_pipe(run_ddplaunch, run_in_fork, tmp_path):
    write_program(tmp_path, "训练.py", "")
    assert run_ddplaunch("run", *LIGHT, "训练.py", "--数据", "语" * 15).returncode == 0
    shown = re.sub(r"\x1b\[\d*m", "", run_in_terminal(ddplaunch_command("ps"), tmp_path, columns=80))
    (line,) = (line for line in shown.splitlines() if "训练.py" in line)
    assert display_width(line) <= 80
    assert line.endswith("…")
    assert f"训练.py --数据 {'语' * 15}\n" in run_in_fork("ps").stdout, "with a run id of its own"
    narrow = re.sub(r"\x1b\[\d*m", "", run_in_terminal(ddplaunch_command("report"), tmp_path, columns=40))
    assert re.search(r"(?m)^RANK  LASTED  PEAK MEMORY  ENDED WITH$", narrow), narrow


def test_the_target_of_a_table():
    assert short_target("python train.py --lr 1") == "train.py --lr 1"
    assert short_target("python -m pkg.mod") == "-m pkg.mod"
    assert short_target("python /tmp/ddplaunch-a1/launch.py:divide --folder /tmp/ddplaunch-a1") == "divide()"
    assert short_target("python ./.ddplaunch-a1/launch.py:divide --folder x") == "divide()"
    assert short_target("./prog -x") == "./prog -x"


def test_logs_and_report_of_a_failure(run_ddplaunch, run_in_fork, tmp_path):
    write_program(tmp_path, "fails.py", FAILS)
    printed = run_ddplaunch("run", "--nproc", "2", "--max-restarts", "1", "--run-id", MINE, *LIGHT, "fails.py").stderr
    out = run_in_fork("logs", MINE).stdout
    assert "[0] rank 0 speaks\n" in out
    assert "[1] rank 1 speaks\n[1] Traceback (most recent call last):\n" in out
    assert run_in_fork("logs", MINE, "--rank", "0").stdout == "rank 0 speaks\n"
    failed = run_in_fork("logs", MINE[2:], "--failed").stdout
    assert failed.startswith("rank 1 speaks\nTraceback")
    line = json.loads(run_in_fork("logs", MINE, "--json", "--rank", "0").stdout)
    assert line == {"rank": 0, "line": "rank 0 speaks"}

    out = run_in_fork("report", MINE).stdout
    first, _, rest = out.partition("\n")
    assert first.startswith("goodput ")
    assert rest.startswith(f"{MINE}: failed with exit code 1\n  ddplaunch run --nproc 2 ")
    assert printed[printed.rindex("ddplaunch: rank 1 failed with") :].partition("ddplaunch: no restart")[0] in out
    assert [line.split()[0] for line in out.partition("ATTEMPT")[2].splitlines()[1:3]] == ["0", "1"]
    assert "MiB" in row(out.partition("RANK ")[2], "1")
    assert out.endswith(f"output: ddplaunch logs {MINE}\n")
    found = json.loads(run_in_fork("report", MINE, "--json").stdout)
    assert (found["state"], found["code"], len(found["attempts"])) == ("failed", 1, 2)
    assert found["failure"]["first"]["rank"] == 1


@pytest.mark.slow
def test_without_a_name_it_is_the_newest_run_of_this_folder(
    start_ddplaunch, running, run_in_fork, tmp_path, monkeypatch
):
    (tmp_path / "other").mkdir()
    for run, folder in ((f"{MINE}-a", tmp_path), (f"{MINE}-b", tmp_path), (f"{MINE}-c", tmp_path / "other")):
        monkeypatch.chdir(folder)
        keep(run_id=run, code=3, printed=b"rank\n")
    os.utime(history_store.run_dir(f"{MINE}-a"))  # of a record that something was done to
    for words in (("report",), ("logs",), ("logs", "-f"), ("wait",)):
        done = run_in_fork(*words)
        assert done.stderr.splitlines()[0] == f"{NEWEST}: {MINE}-b"
    assert done.returncode == 3
    assert json.loads(run_in_fork("report", "--json").stdout)["run"] == f"{MINE}-b"
    (empty := tmp_path / "empty").mkdir()
    refused = run_in_fork("report", cwd=empty)
    assert refused.stderr.startswith(f"Error: no running or recorded run was started in {empty}\n  name one: ")
    job = running("--no-history")
    monkeypatch.chdir(tmp_path)
    keep(run_id=f"{MINE}-d")
    waiting = start_ddplaunch("wait")
    wait_until(lambda: waiting.stderr() == f"{NEWEST}: {NAME}\n", "one that still runs")
    assert run_in_fork("report").stderr == f"{NEWEST}: {MINE}-d\n"
    job.signal(signal.SIGTERM)
    assert waiting.wait() == job.wait()


def test_the_pid_of_a_run_is_not_the_number_of_a_job_once_it_has_ended(running, monkeypatch):
    """A submitted job happens to have that number; its scheduler is not asked."""
    job = running()
    pid, stream_replies = str(job.process.pid), client.stream_replies
    submitted_jobs.save_job(SubmittedJob(
        number=pid, cluster=None, name="other.py", target="", nodes=1, array=None, cwd="", log="", run_id=None,
        python="", image=None, moment=0.0,
    ))  # fmt: skip

    def end_meanwhile(path, request):
        job.signal(signal.SIGTERM)
        return stream_replies(path, request)

    monkeypatch.setattr(stop_module.client, "stream_replies", end_meanwhile)
    done = CliRunner().invoke(wait, [pid], standalone_mode=False)
    assert (done.return_value, done.output) == (143, ""), done


PRINTS = """
    import os, sys, time
    rank = int(os.environ["RANK"])
    print("start")
    for step in range(100 * rank):
        print("of", rank)
    print("end", flush=True)
    open(f"printed-{rank}", "w").close()
    while not all(os.path.exists(f"printed-{each}") for each in range(3)):
        time.sleep(0.01)  # the first rank that fails has the others stopped
    sys.exit(3)
"""


def test_equal_lines_of_a_run_are_printed_once(run_ddplaunch, run_in_fork, tmp_path):
    """Equal lines are merged wherever they are in the output of each rank."""
    write_program(tmp_path, "ends.py", PRINTS)
    run_ddplaunch("run", "--nproc", "3", "--run-id", MINE, "--log-dir", "logs", *LIGHT, "ends.py")
    assert run_in_fork("logs", MINE, cwd=Path("/")).stdout.count("start\n") == 3
    rows = run_in_fork("logs", MINE, "--merge").stdout.splitlines()
    assert rows == ["[0-2] start", *["[1]   of 1"] * 100, *["[2]   of 2"] * 200, "[0-2] end"]
    assert run_in_fork("logs", MINE, "--merge", "--rank", "2").stdout.startswith("start\nof 2\n")


@pytest.mark.ci
@pytest.mark.parametrize("words", [(), ("--log-dir", "logs")])
def test_following_a_job_to_its_end(running, words):
    """A reader that leaves early causes no error."""
    job = running(*words)

    def follow(*more: str) -> "subprocess.Popen[str]":
        typed = ddplaunch_command("logs", NAME, "-f", *more)
        return subprocess.Popen(
            typed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
        )

    with follow("--rank", "1") as of_one, follow("--merge") as merging, follow() as interrupted:
        assert (of_one.stdout.readline(), of_one.stdout.readline()) == ("up 1\n", "on\n")
        assert any(line == "[0-1] on\n" for line in merging.stdout)
        interrupted.stdout.readline()
        interrupted.send_signal(signal.SIGINT)
        _, err = interrupted.communicate()
        assert (interrupted.returncode, err.strip()) == (130, "")
        followed = " ".join(ddplaunch_command("logs", NAME, "-f"))
        done = run_command(["bash", "-c", f"{followed} | head -n 2"])
        assert (done.stdout.count("\n"), done.stderr) == (2, "")
        assert job.process.poll() is None
        job.signal(signal.SIGTERM)
        assert set(of_one.communicate()[0].splitlines()) <= {"on", "o"}
        merging.communicate()
    assert (of_one.returncode, merging.returncode) == (0, 0)


def test_stop(running, run_in_fork):
    job = running()
    done = run_in_fork("stop", NAME[:-1])
    assert done.returncode == 0
    assert done.stderr.splitlines()[0] == f"stopping {NAME}: 2 ranks"
    assert done.stderr.splitlines()[-1] == f"{NAME} has ended"
    assert job.process.poll() == 130
    assert "ddplaunch: `ddplaunch stop` was called: stopping 2 ranks\n" in job.stderr()
    assert "Ctrl-C" not in job.stderr()
    record = history_store.read_run_record(NAME)
    assert (record.fate.value, record.remark) == ("stopped", "stopped because `ddplaunch stop` was called")
    assert run_in_fork("stop", NAME).stderr.startswith(f"Error: {NAME} has ended\n  ddplaunch report {NAME}")


def test_stop_sends_its_request_once_a_suspended_launcher_continues(monkeypatch):
    suspended, sent = [True, True, True, False], list[object]()
    monkeypatch.setattr(stop_module, "CONTINUE_TIMEOUT_S", 600.0)
    monkeypatch.setattr(stop_module, "is_suspended", lambda pid: suspended.pop(0))
    monkeypatch.setattr(stop_module, "wait_for_end", lambda pid, timeout_s: True)

    def send_request(path: str, request: object) -> SimpleNamespace:
        assert not suspended, "it cannot reply yet"
        sent.append(request)
        return SimpleNamespace(run_id=NAME, ranks=())

    monkeypatch.setattr(client, "send_request", send_request)
    monkeypatch.setattr(running_jobs, "list_running", lambda: [RunningJob("socket", NAME, os.getpid())])
    assert CliRunner().invoke(stop, ["--all", "--now"]).exit_code == 0
    assert sent == [StatusQuery(), StopJobRequest(now=True)]


def test_stop_shows_the_ranks_left_and_stop_now_kills_them(start_ddplaunch, run_in_fork, tmp_path):
    write_program(
        tmp_path,
        "stubborn.py",
        """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("up", flush=True)
        time.sleep(600)
        """,
    )
    job = start_ddplaunch("run", "--nproc", "2", "--run-id", "stubborn", "--grace", "600", *LIGHT, "stubborn.py")
    job.wait_for("up", 2)
    stopping = start_ddplaunch("stop", "stubborn")
    wait_until(lambda: "waiting for 2 ranks; --now kills what is left\n" in stopping.stderr(), "whom it waits for")
    assert run_in_fork("stop", "stubborn", "--now").returncode == 0
    assert (stopping.wait(), job.wait()) == (0, 130)


def test_wait_ends_with_the_exit_code_of_the_run(running, start_ddplaunch, run_in_fork):
    job = running()
    waiting = start_ddplaunch("wait", NAME)
    os.kill(job.ranks()[1], signal.SIGKILL)
    assert waiting.wait() == job.wait() == 137
    assert run_in_fork("wait", NAME).returncode == 137


def test_wait_for_a_run_that_has_just_closed_its_control_socket(running, monkeypatch):
    """The exit code is known, although the launcher is still ending."""
    job = running()

    def too_late(path: str, question: object) -> None:
        os.unlink(path)
        job.signal(signal.SIGTERM)
        raise JobNotResponding(path)

    monkeypatch.setattr(client, "stream_replies", too_late)
    assert wait.callback(NAME) == job.wait() == 143


def test_stop_matches_no_part_of_a_number_in_a_name(running, run_in_fork):
    """The number may be that of a forgotten batch job."""
    job = running(run_id="sweep-4711-b")
    for word in ("711", "471"):
        done = run_in_fork("stop", word)
        assert (done.returncode, done.stderr.splitlines()[0]) == (2, f'Error: no run named "{word}"')
    assert job.process.poll() is None
    assert run_in_fork("stop", "4711").returncode == 0
    assert job.wait() == 130


def test_wait_for_a_run_whose_launcher_was_killed(running, start_ddplaunch, run_in_fork):
    job = running()
    waiting = start_ddplaunch("wait", NAME)
    job.signal(signal.SIGKILL)
    assert (waiting.wait(), waiting.stderr()) == (69, f"Error: {NAME} has no exit code: its launcher was killed\n")
    assert history_store.read_run_record(NAME).fate.value == "lost"
    assert run_in_fork("wait", NAME).returncode == 69
    lost = f"the launcher of {NAME} was killed, and the output in its memory is lost"
    assert lost in run_in_fork("logs", NAME).stderr


def test_clean_removes_ended_runs_and_refuses_a_running_one(running, run_in_fork):
    running()
    for name in ("a", "b", "c"):
        keep(run_id=name)
    assert run_in_fork("clean", "b").stderr.startswith("removed 1 run, ")
    assert sorted(history_store.list_runs()) == ["a", "c", NAME]
    refused = run_in_fork("clean", NAME)
    assert (refused.returncode, refused.stderr) == (2, f"Error: {NAME} is still running\n  ddplaunch stop {NAME}\n")
    asked = run_in_fork("clean")
    assert asked.returncode == 2
    assert asked.stderr.splitlines()[1:] == ["  confirm with --yes; or --older-than 7d, or name one run"]
    assert asked.stderr.startswith("Error: this would delete the records of 2 runs, ")
    assert run_in_fork("clean", "--older-than", "1d").stderr == "removed 0 runs, 0 B\n"
    assert sorted(line.split()[0] for line in run_in_fork("clean", "--dry-run").stdout.splitlines()) == ["a", "c"]
    assert "--older-than soon: expected a time" in run_in_fork("clean", "--older-than", "soon").stderr
    assert sorted(history_store.list_runs()) == ["a", "c", NAME]
    assert run_in_fork("clean", "--yes").stderr.startswith("removed 2 runs, ")
    assert history_store.list_runs() == [NAME]


def test_clean_of_all_runs_forgets_jobs_on_other_hosts_that_have_ended(run_in_fork):
    keep(run_id="here")
    for run_id, code in (("over", 0), ("on", None)):
        moments = {"began": time.time(), "ended": None if code is None else time.time()}
        process = {"pid": os.getpid(), "ticks": start_ticks(os.getpid()), "host": host_name()}
        RECORDS.save(SshJob(run_id, ("n1",), "python3", "train.py", "/", **process, **moments, code=code))
    for words in (("here",), ("--older-than", "0s"), ("--dry-run",), ("--yes",)):
        assert sorted(job.run_id for job in RECORDS.list()) == ["on", "over"]
        assert run_in_fork("clean", *words).returncode == 0
    assert [job.run_id for job in RECORDS.list()] == ["on"]


def test_a_lost_run_is_as_old_as_its_last_event(run_in_fork):
    keep(run_id="lost")
    path = Path(history_store.run_dir("lost")) / "node-0.jsonl"
    head, *lines = path.read_text().splitlines()
    began = {**json.loads(head), "began": time.time() - 3 * 86400, "born": 1}
    path.write_text("\n".join([json.dumps(began), *lines[:-1], ""]))
    assert row(run_in_fork("ps").stdout, "lost")[1] == "lost"
    assert run_in_fork("clean", "--older-than", "1d", "--dry-run").stdout == ""


def test_a_reply_of_another_version_on_node_0_is_ignored(monkeypatch):
    job = SubmittedJob(
        number="7", cluster=None, name="t", target="t.py", nodes=1, array=None, cwd="", log="", run_id=None,
        python=sys.executable, image=None, moment=0.0,
    )  # fmt: skip
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    seen = QueuedJob(job, "is running", None, BatchJobState("is running", is_running=True))
    for reply in ('[{"run": "7.1"}]', '{"error": 1}', "[1]", "hello"):
        monkeypatch.setattr(queued_jobs, "query_node_zero", lambda *words, reply=reply: reply)
        assert queued_jobs._query_world_sizes([seen], Deadline(5)) == [seen]
    assert errors == []


def test_clean_asks_at_a_terminal(tmp_path):
    for name in ("a", "b"):
        keep(run_id=name)
    asked = run_in_terminal(ddplaunch_command("clean"), tmp_path, typed="n\n")
    assert "Remove the records of 2 runs, " in asked
    assert sorted(history_store.list_runs()) == ["a", "b"]
    run_in_terminal(ddplaunch_command("clean"), tmp_path, typed="y\n")
    assert history_store.list_runs() == []


def test_logs_of_a_run_that_succeeded(run_ddplaunch, run_in_fork, tmp_path):
    write_program(tmp_path, "ends.py", "import os\nfor n in range(5): print(os.environ['RANK'], 'says', n)\n")
    assert run_ddplaunch("run", "--nproc", "2", "--run-id", MINE, *LIGHT, "ends.py").returncode == 0
    assert run_in_fork("logs", MINE).stdout == "".join(
        f"[{rank}] {rank} says {n}\n" for rank in (0, 1) for n in range(5)
    )
    assert run_in_fork("logs", MINE, "--tail", "2").stdout == "".join(
        f"[{rank}] {rank} says {n}\n" for rank in (0, 1) for n in (3, 4)
    )
    assert run_in_fork("logs", MINE, "--tail", "9", "--rank", "1").stdout.startswith("1 says 0\n")
    assert f"output: ddplaunch logs {MINE}" in run_in_fork("report", MINE).stdout
    keep(run_id="silent")
    done = run_in_fork("logs", "silent")
    assert (done.returncode, done.stdout) == (0, "")
    assert "have printed nothing" in done.stderr


def test_the_last_lines_of_a_job_that_runs(running, run_in_fork, tmp_path, monkeypatch):
    running("--log-dir", "logs")
    big = tmp_path / "big"
    big.write_bytes(b"x" * 70_000 + b"\n" + b"line\n" * 30_000)
    with big.open("rb") as file:
        assert read_last_lines(file, 20_000) == b"line\n" * 20_000

    def read_while_it_grows(file, lines):
        with big.open("ab") as more:
            found = read_last_lines(file, lines)
            more.write(b"more\n")
        return found

    monkeypatch.setattr(rank_logs, "read_last_lines", read_while_it_grows)
    assert [*rank_logs.read_stored_output({0: [str(big)]}, [0], rank_logs.OutputPart(1))] == [(0, b"line\n")]
    assert run_in_fork("logs", NAME, "--tail", "1", "--rank", "0").stdout.count("on") == 1
    following = subprocess.Popen(
        ddplaunch_command("logs", NAME, "--tail", "1", "--rank", "1", "-f"),
        stdout=subprocess.PIPE, text=True, env=clean_environment(),
    )  # fmt: skip
    assert [following.stdout.readline() for _ in range(3)] == ["on\n"] * 3, "the last line, and what follows"
    assert run_in_fork("stop", NAME).returncode == 0
    following.communicate()
    assert following.returncode == 0


@pytest.mark.parametrize(
    ("data", "count", "last"),
    [
        (b"a\nb\nc\n", 2, b"b\nc\n"), (b"a\nb\nc", 2, b"b\nc"), (b"a\n", 3, b"a\n"), (b"", 1, b""),
        (b"\n\n\n", 2, b"\n\n"), (b"a", 1, b"a"), (b"\na", 1, b"a"), (b"\n", 1, b"\n"),
    ],
)  # fmt: skip
def test_last_lines(data, count, last):
    assert last_lines(data, count) == last


@pytest.mark.ci
def test_stop_all(running, monkeypatch):
    """The jobs of tests that run beside this one are left out."""
    jobs = [running(run_id=f"{NAME}-{number}") for number in range(2)]
    jobs[0].signal(signal.SIGSTOP)
    wait_until(lambda: is_suspended(jobs[0].process.pid), "the launcher to stop")
    pids = [job.process.pid for job in jobs]
    mine = [each for each in running_jobs.list_running() if each.pid in pids]
    monkeypatch.setattr(running_jobs, "list_running", lambda: mine)
    done = CliRunner().invoke(stop, ["--all"])
    assert "was suspended: " in done.stderr
    assert done.stderr.count(" has ended\n") == 2
    assert [job.wait() for job in jobs] == [130, 130]


def test_stop_all_reaches_the_other_jobs_if_one_has_just_ended(running, monkeypatch, tmp_path):
    job = running()
    gone = RunningJob(str(tmp_path / "gone.1"), "gone", 1)
    jobs = [gone, *(each for each in running_jobs.list_running() if each.pid == job.process.pid)]
    monkeypatch.setattr(running_jobs, "list_running", lambda: jobs)
    done = CliRunner().invoke(stop, ["--all"])
    assert isinstance(done.exception, JobNotResponding)
    assert done.stderr.endswith(f"{NAME} has ended\n")
    assert job.wait() == 130


def test_why_a_run_has_no_output():
    record = {"log_dir": None, "world_size": 2, "fate": RunState.LOST}
    for changes, expected in (
        ({}, "the launcher of r was killed, and the output in its memory is lost"),
        ({"fate": RunState.FAILED}, "no output of r is kept here"),
        ({"world_size": 1}, "the only rank of r printed straight to its terminal"),
        ({"log_dir": "x"}, "x has no output of such a rank"),
    ):
        found = SimpleNamespace(run="r", record=SimpleNamespace(**{**record, **changes}))
        assert _why_no_output(found)[0] == expected


def test_a_run_on_another_machine_that_shares_the_home(run_in_fork):
    keep(run_id="far")
    path = Path(history_store.run_dir("far")) / "node-0.jsonl"
    head, *lines = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(head), "host": "n7"}), *lines[:-1], ""]))
    for command, code in (("wait", 69), ("logs", 1), ("clean", 2), ("stop", 2), ("stacks", 2), ("debug", 2)):
        done = run_in_fork(command, "far")
        assert done.stderr == "Error: far runs on n7, not on this machine\n  type the command on n7\n"
        assert done.returncode == code
    assert "far: running\n" in run_in_fork("report", "far").stdout


def test_a_run_whose_control_socket_cannot_be_found_is_not_removed(run_in_fork):
    keep(run_id="here")
    path = Path(history_store.run_dir("here")) / "node-0.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    done = run_in_fork("clean", "here")
    assert (done.returncode, done.stderr) == (2, "Error: here is still running\n  ddplaunch stop here\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("report", "don"), 'no run named "don"'),
        (("stop", "gone"), 'no run named "gone"'),
        (("clean", "gone"), 'no run named "gone"'),
        (("stop", "--all", "done"), "--all is for all runs, not for done"),
        (("clean", "--older-than", "1d", "done"), "--older-than is for all runs, not for done"),
        (("logs", "done", "--failed"), "no rank of done has failed"),
        (("logs", "done", "--tail", "1", "--since", "9m"), "--tail and --since contradict each other\n  leave one of"),
        (("logs", "done", "--rank", "2"), "--rank 2: done has ranks 0 to 1\n  --rank 1"),
        (("logs", "done", "--rank", "-1"), "--rank -1: done has ranks 0 to 1"),
        (("logs", "done", "--rank", "x,1"), "--rank x,1: expected ranks like 3 or 0,3"),
        (("logs", "done", "--rank", "1", "--failed"), "--rank and --failed contradict each other"),
        (("stop", "done"), "done has ended\n  ddplaunch report done"),
        (("logs", "\x1b[2J" + "x" * 5000), 'no run named "'),
    ],
)
def test_refused_words_of_commands_for_runs(run_in_fork, words, expected):
    if words[:2] != ("report", "don"):
        keep(run_id="done")
    done = run_in_fork(*words)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith(f"Error: {expected}")
    assert len(done.stderr.splitlines()) <= 3
    assert "\x1b" not in done.stderr


@pytest.mark.ci
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
def test_another_user_sees_and_reaches_nothing(running):
    job = running()
    for words in (("ps", "--json"), ("logs", NAME), ("stop", NAME)):
        text = (
            "import os, sys, json, difflib, msgspec, tempfile, ddplaunch.cli\n"
            "from ddplaunch.features.runs import logs, ps, rank_logs, stop\n"
            "from ddplaunch.features.ssh import job_records\n"
            "from ddplaunch.features.submit import code_copies\n"
            "os.chdir('/'); os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            f"sys.argv = ['ddplaunch', *{words!r}]; ddplaunch.cli.main()"
        )
        done = run_command([sys.executable, "-c", text])
        assert NAME not in done.stdout
        if words[0] == "ps":
            assert json.loads(done.stdout) == []
        else:
            assert done.stderr.startswith(f'Error: no run named "{NAME}"')
    assert job.process.poll() is None


def test_bytes_that_are_not_utf_8(run_ddplaunch, run_in_fork, tmp_path):
    """A run with such arguments and folders is recorded, and its log folder is found."""
    folder = tmp_path / os.fsdecode(b"b\xff")
    folder.mkdir()
    write_program(folder, "t.py", "import os, sys\nprint(os.fsencode(sys.argv[1]))\nraise ValueError(sys.argv[1])")
    words = ("--run-id", MINE, "--log-dir", os.fsdecode(b"l\xfe"), *LIGHT, "--nproc", "2")
    done = run_ddplaunch("run", *words, "t.py", os.fsdecode(b"x\xfd"), cwd=folder)
    assert done.returncode == 1
    assert row(run_in_fork("ps").stdout, MINE)[1:3] == ["failed", "(1)"]
    output = run_in_fork("report", MINE).stdout
    for text in ("x\\udcfd", "b\\udcff", "l\\udcfe", "ValueError"):
        assert text in output, output
    assert json.loads(run_in_fork("report", MINE, "--json").stdout)["log_dir"].endswith("l\\udcfe/" + MINE)
    assert "log folder" in run_in_fork("report", MINE, "--html", "-").stdout
    assert "b'x\\xfd'" in run_in_fork("logs", MINE).stdout
