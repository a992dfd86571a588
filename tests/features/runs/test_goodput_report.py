"""Tests of goodput as the commands report it: of a run, a scheduler's job, all runs; and of hosts to exclude."""

import json
import re
import time

import pytest
from msgspec.structs import replace

from ddplaunch.core import events
from ddplaunch.features.runs.history_recorder import HistoryRecorder
from ddplaunch.system.schedulers import submitted_jobs
from ddplaunch.system.schedulers.submitted_job import SubmittedJob
from tests.conftest import write_program
from tests.features.runs.recorded_events import plan
from tests.features.runs.test_goodput import failed
from tests.features.runs.test_history import keep

pytestmark = pytest.mark.usefixtures("state")

JOB = "4711"
MINE = "mine"


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
    assert sum(value for name, value in result["spent"].items() if name != "restarts") == pytest.approx(
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
    assert result["spent"]["queued"] > 0, "between them"
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
    assert 0.05 <= result["spent"]["queued"] < 60


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
