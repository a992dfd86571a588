"""Tests of goodput as the commands report it: of a run, a scheduler's job, all runs; and of hosts to exclude."""

import json
import re
import time

import click
import pytest
from msgspec.structs import replace

from ddplaunch.core import events
from ddplaunch.features.runs import report_text
from ddplaunch.features.runs.history_recorder import HistoryRecorder
from ddplaunch.observe.history.run_record import RunState
from ddplaunch.observe.history.time_breakdown import TimeBreakdown
from ddplaunch.system.schedulers import submitted_jobs
from ddplaunch.system.schedulers.submitted_job import SubmittedJob
from tests.conftest import write_program
from tests.core.output.sample_records import BEGAN, record
from tests.features.runs.recorded_events import plan
from tests.features.runs.test_goodput import failed
from tests.observe.history.test_history import keep

pytestmark = pytest.mark.usefixtures("state")

JOB = "4711"
MINE = "mine"


REPORT = """\
goodput 75 %: 9.0 s of 12 s; lost: 3.0 s in 2 restarts
RUN                   BEGAN                LASTED  GOODPUT  ENDED
a                     [0]  0.0s    -        lost: its launcher was killed, or the machine went down
20261122-155025-f409  [0]  12s     75 %     failed with exit code 1

20261122-155025-f409: failed with exit code 1
  ddplaunch run --nproc 9 train.py --lr 0.1
  in /home/ada/nets on n0, 9 ranks on 2 nodes
  began [0], lasted 3m04s
  node 1 (n1): preempted, exit code 75

ddplaunch: rank 2 failed with ValueError: no labels (exit code 1) (on n0)
  Traceback (most recent call last):
    File "train.py", line 88, in train
      check(batch)
  ValueError: no labels
  8 other ranks were stopped

stopped because

ATTEMPT  BEGAN                LASTED  ENDED
1        [1]  1m00s   rank 2 failed with ValueError: no labels (exit code 1)
2        [2]  -       -
  and 4 before

RANK  HOST  LASTED  PEAK MEMORY  CPU    ENDED WITH
0     n0    1m00s   1.0 GiB      50s    SIGTERM
1     n0    59s     1.5 GiB      1m01s  SIGTERM
2     n0    57s     1.2 GiB      1m12s  exit code 1
3     n0    -       -            -      -
  and 5 more ranks; --json has all

note: no restarts left (--max-restarts 2)

output: ddplaunch logs a
"""
NARROW = """\
RUN                   ENDED
a                     lost: its launcher
                      was killed, or the
                      machine went down
20261122-155025-f409  failed with exit
                      code 1
ATTEMPT  LASTED  ENDED
1        1m00s   rank 2 failed with
                 ValueError: no labels
                 (exit code 1)
2        -       -
RANK  HOST  PEAK MEMORY  ENDED WITH
0     n0    1.0 GiB      SIGTERM
"""


def test_the_report_of_a_job_of_two_runs(monkeypatch):
    """In a terminal its tables are as wide as that."""
    monkeypatch.setattr(report_text, "MAX_RANKS", 4)
    monkeypatch.setattr(report_text, "MAX_ATTEMPTS", 2)
    spent = TimeBreakdown(steady=9.0, restarting=3.0, restarts=2)
    run = replace(record(9, 3), left_out=3, remark="stopped because", spent=spent)
    *earlier, last = run.attempts
    ranks = (*last.ranks[:3], replace(last.ranks[3], ended=None, code=None, peak_memory=0), *last.ranks[4:])
    run = replace(run, attempts=(*earlier, replace(last, ranks=ranks, ended=None, why="")))
    lost_earlier = replace(record(9), node_rank=1, host="n1", fate=RunState.PREEMPTED, code=75)
    total = report_text.TimeOfRuns([replace(record(1, 0), run="a", fate=RunState.LOST), run], spent)

    def lines(across: int | None) -> str:
        text = "\n".join(report_text.render_report([run, lost_earlier], total, "output: ddplaunch logs a", across))
        for attempt in range(3):
            began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGAN + 62 * attempt))
            text = text.replace(began, f"[{attempt}]")
        return click.unstyle(text) + "\n"

    assert lines(None) == REPORT
    assert [line for line in lines(40).splitlines() if line in NARROW.splitlines()] == NARROW.splitlines()


@pytest.fixture
def in_job(monkeypatch):
    """Keep a run as within the job, or, with None, outside of any."""

    def kept(run_id: str, job: str | None = JOB, code: int = 0) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", job) if job else monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        keep(run_id=run_id, code=code)
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    return kept


def submit(run_id: str | None, ago: float) -> None:
    words = {"cluster": None, "name": "train.py", "target": "train.py", "nodes": 1, "array": None, "cwd": "/"}
    more = {"log": "/nowhere", "python": "python", "image": None, "ended": "completed", "code": 0, "scheduler": "pbs"}
    submitted_jobs.save_job(SubmittedJob(number=JOB, run_id=run_id, moment=time.time() - ago, **words, **more))


def test_a_report_begins_with_the_effective_time(run_in_fork, tmp_path):
    keep(run_id=MINE)
    out = run_in_fork("report", MINE).stdout.splitlines()
    assert re.match(r"goodput \d+ %: \S+ s of \S+ s", out[0])
    assert out[1] == f"{MINE}: succeeded"
    result = json.loads(run_in_fork("report", MINE, "--json").stdout)
    assert result["runs"] == [MINE]
    assert sum(value for name, value in result["time_by_phase"].items() if name != "restarts") == pytest.approx(
        result["ended"] - result["began"], abs=1e-3
    )
    run_in_fork("report", MINE, "--html", "page.html")
    assert f"<p>{out[0]}" in (tmp_path / "page.html").read_text()
    assert "GOODPUT" in run_in_fork("ps", "--all").stdout
    (row,) = (each for each in json.loads(run_in_fork("ps", "--json").stdout) if each["run"] == MINE)
    assert 0 <= row["effective"] <= 1


def test_a_job_number_means_all_of_its_runs(in_job, run_in_fork):
    """A requeued job has several runs; a run of another user with the same id is not among them."""
    in_job(f"{JOB}.0", code=1)
    in_job(f"{JOB}.0")
    in_job(f"{JOB}.0", None)
    result = json.loads(run_in_fork("report", JOB, "--json").stdout)
    assert (result["run"], result["runs"]) == (f"{JOB}.0.2", [f"{JOB}.0.1", f"{JOB}.0.2"])
    assert result["time_by_phase"]["queued"] > 0, "between them"
    out = run_in_fork("report", JOB).stdout
    assert re.search(rf"^{JOB}\.0\.1  .* failed with exit code 1$", out, re.MULTILINE)
    alone = json.loads(run_in_fork("report", f"{JOB}.0.1", "--json").stdout)
    assert alone["runs"] == [f"{JOB}.0.1"]


@pytest.mark.parametrize("known", [True, False])
def test_a_submitted_job_was_queued_before_it_began(in_job, run_in_fork, known):
    """A run of that name from before its submission is not one of its runs."""
    in_job("night", None)
    submit("night", 0.0)
    time.sleep(0.05)  # the time that is measured
    for _ in range(2):
        in_job("night", JOB if known else None)
    result = json.loads(run_in_fork("report", JOB, "--json").stdout)
    assert result["runs"] == ["night.2", "night.3"]
    assert 0.05 <= result["time_by_phase"]["queued"] < 60


def fail(host: str, run_id: str) -> None:
    """Keep a run whose rank on this host was killed."""
    verdict = failed(host, time.time(), number=9).verdict
    assert verdict
    kept = HistoryRecorder(replace(plan(run_id)), lambda rank: b"", lambda: None, pytest.fail)
    for event in (events.AttemptPlanned(plan(run_id), 0), events.AttemptSwept((), ()), events.JobEnded(137, verdict)):
        kept.observe(event)


def test_report_since_sums_all_recent_runs(run_in_fork):
    assert run_in_fork("report", "--since", "7d").stdout == "no recorded run began in the last 7 d and ended\n"
    keep(run_id="well")
    for number, host in enumerate(("n3", "n4", "n3")):
        fail(host, f"f{number}")
    out = run_in_fork("report", "--since", "7d").stdout
    assert re.match(r"goodput \d+ %: .*\n  4 runs began in the last 7 d and ended\n", out)
    assert re.search(r"^LOST +SHARE\n", out, re.MULTILINE)
    hosts = out.partition("HOST")[2].splitlines()[1:]
    assert [line.split()[:2] for line in hosts] == [["n3", "2"], ["n4", "1"]]
    assert "rank 3 was ended by SIGKILL" in hosts[0]
    result = json.loads(run_in_fork("report", "--since", "1h", "--json").stdout)
    assert (len(result["runs"]), [each["host"] for each in result["hosts"]]) == (4, ["n3", "n4"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--since", "soon"), "Error: --since soon: expected a time, like 12h or 7d\n"),
        (("--since", "7d", "mine"), "Error: --since 7d is for all runs, not for mine\n"),
        (("--since", "7d", "--html", "x.html"), "Error: --since 7d is for all runs, not for --html\n"),
    ],
)
def test_options_that_contradict_since(run_in_fork, words, expected):
    done = run_in_fork("report", *words)
    assert done.returncode == 2
    assert done.stderr.startswith(expected)


def test_submit_names_hosts_that_failed_repeatedly(run_in_fork, tmp_path, monkeypatch):
    """Only failures in batch jobs count, and the script is not changed."""
    write_program(tmp_path, "train.py", "")
    monkeypatch.setenv("SLURM_JOB_ID", JOB)
    for number, host in enumerate(("n3", "n4", "n3", "n5", "n5")):
        fail(host, f"f{number}")
    monkeypatch.delenv("SLURM_JOB_ID")
    fail("n4", "here")
    done = run_in_fork("submit", "--dry-run", "train.py")
    hint = "failed in your jobs of the last 7 days: n5 (2 times), n3 (2 times); to exclude them: --exclude n5,n3"
    assert hint in done.stderr
    assert "exclude" not in done.stdout
    done = run_in_fork("submit", "--dry-run", "--exclude", "n[1-3]", "train.py")
    assert "of the last 7 days: n5 (2 times); to exclude them: --exclude n[1-3],n5" in done.stderr
    assert "7 days" not in run_in_fork("submit", "--dry-run", "--exclude", "n[3-5]", "train.py").stderr
