"""Tests of commands for submitted jobs, with stand-ins for Slurm's programs; tests/slurm has real ones."""

import json
import re
import time

import pytest

from ddplaunch.features.runs.report_server import LivePage
from ddplaunch.features.submit.slurm import Slurm
from ddplaunch.system.schedulers.scheduler import BatchJobState, JobId
from tests.conftest import assert_refused, write_program
from tests.features.submit.test_submit import Cluster
from tests.scaled_timeouts import scaled_timeout


@pytest.fixture
def cluster(tmp_path):
    write_program(tmp_path, "train.py", "")
    return Cluster(tmp_path)


@pytest.fixture
def answers(run_in_fork, cluster, tmp_path):
    """Run a command on that cluster."""

    def run(*words: str):
        return run_in_fork(*words, env={**cluster.environ})

    return run


def kept(tmp_path):
    """Return the stored record of job 77."""
    return json.loads((tmp_path / "state/ddplaunch/submitted/77.json").read_text())


def test_a_job_is_followed_again(answers, cluster, tmp_path):
    """The end is stored, so it is known after Slurm has forgotten the job."""
    assert answers("submit", "--cpus-per-task", "2", "train.py", "--", "--lr", "1").returncode == 0
    assert (kept(tmp_path)["target"], kept(tmp_path)["code"]) == ("train.py --lr 1", None)
    cluster.plays('echo one >> "$STATE/log"; say RUNNING None 0:0', "say FAILED NonZeroExitCode 3:0")
    done = answers("attach")
    assert (done.returncode, done.stdout) == (3, "one\n")
    assert done.stderr == "ddplaunch: job 77 failed (exit code 3)\n"
    cluster.plays(*["echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"] * 2)
    (tmp_path / "slurm-77.out").write_text("one\n")
    again = answers("attach", "train.py")
    assert (again.returncode, again.stdout, again.stderr) == (3, "one\n", done.stderr)
    assert "failed (exit code 3)" in answers("ps").stdout
    stopped = answers("stop", "77")
    assert stopped.returncode == 2
    assert "job 77 failed (exit code 3)" in stopped.stderr
    for words, missing in (("report 77", "its record"), ("logs 77 --failed", "the output of its ranks")):
        assert f"{missing} is not on this machine" in answers(*words.split()).stderr
    assert not (cluster.folder / "cancelled").exists()


def keep_run_without_end(tmp_path):
    """Keep the record of job 77's run on n1, as a node leaves it whose launcher was killed."""
    head = {"run_id": "77.0", "target": "train.py", "argv": ["ddplaunch", "run", "train.py"], "host": "n1", "cwd": "/"}
    head |= {"pid": 44, "born": 1, "began": time.time(), "job": "77", "node_rank": 0, "nnodes": 1, "world_size": 1}
    write_program(tmp_path / "state/ddplaunch/runs/77.0", "node-0.jsonl", json.dumps(head) + "\n")
    for folder in ("state/ddplaunch", "state/ddplaunch/runs", "state/ddplaunch/runs/77.0"):
        (tmp_path / folder).chmod(0o700)


@pytest.mark.parametrize("run", ["77", "77.0"])
def test_the_report_has_the_end_of_a_run_from_slurm(answers, cluster, tmp_path, monkeypatch, run):
    """The node was killed before it recorded the end."""
    answers("submit", "train.py")
    keep_run_without_end(tmp_path)
    cluster.plays("say RUNNING None 0:0", "say FAILED NonZeroExitCode 137:0", "exit 1")
    assert "77.0: running\n" in answers("report", run).stdout
    found = answers("report", run)
    assert (found.returncode, found.stderr) == (0, "job 77 failed (exit code 137)\n"), "asked once"
    assert "77.0: lost: its launcher was killed, or the machine went down\n" in found.stdout
    monkeypatch.setenv("XDG_STATE_HOME", cluster.environ["XDG_STATE_HOME"])
    pages = [LivePage("77.0", job).get_page() for job in (None, BatchJobState("failed", 137))]
    assert [b">lost<" in page for page in pages] == [False, True]
    (cluster.folder / "down").touch()
    if run == "77.0":
        found = answers("report", run)
        assert "Slurm's controller is down: Slurmctld(primary) at n0 is DOWN; no job is affected" in found.stderr
        assert "77.0: running\n" in found.stdout
    else:
        assert "77.0: running\n" in answers("report", "77").stdout, "the record is at hand"


def test_the_report_of_a_job_that_waits_and_never_starts(answers, cluster):
    answers("submit", "train.py")
    cluster.plays(*["say PENDING Resources 0:0"] * 2, "say CANCELLED None 0:15")
    waits = answers("report", "77")
    assert (waits.returncode, waits.stdout.startswith("job 77 waits: Resources")) == (0, True), waits
    as_json = json.loads(answers("report", "77", "--json").stdout)
    assert (as_json["job"], as_json["state"].startswith("waits: Resources"), as_json["code"]) == ("77", True, None)
    never = answers("report", "77")
    assert never.returncode != 0
    assert ".out" not in never.stderr, "there is no such file"
    assert "job 77 was cancelled" in never.stderr
    assert "it never started" in never.stderr


def test_stopping_a_script_of_ones_own_that_has_ended(answers, cluster, tmp_path):
    """By the number of the job, and by a part of the name of its run, of which the launcher was killed."""
    keep_run_without_end(tmp_path)
    ended = "JobId=77 JobState=FAILED Reason=None Restarts=0 ExitCode=137:0 BatchHost=n1 Power="
    cluster.plays(*[f"echo {ended}"] * 9)
    for word in ("77", "77.0"):
        assert_refused(answers("stop", word), f"{word} has ended", f"ddplaunch report {word}")


@pytest.mark.parametrize(("host", "fate"), [("n1.site", "lost: "), ("c1", "running")])
def test_the_end_of_a_script_of_ones_own_from_slurm(answers, cluster, tmp_path, host, fate):
    """A job of that number on another host belongs to another cluster."""
    keep_run_without_end(tmp_path)
    cluster.plays(f"echo JobId=77 JobState=FAILED Reason=None Restarts=0 ExitCode=137:0 BatchHost={host} Power=")
    found = answers("report", "77")
    assert f"77.0: {fate}" in found.stdout
    assert ("job 77 failed (exit code 137)" in found.stderr) == (host != "c1")


def test_a_long_log_is_shown_from_near_its_end(answers, cluster, tmp_path):
    answers("submit", "train.py")
    (cluster.folder / "log").write_text("".join(f"line {number}\n" for number in range(100_000)))
    cluster.plays("say COMPLETED None 0:0")
    done = answers("attach", "77")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[-1] == "line 99999"
    assert lines[0].startswith("line ")
    assert len(done.stdout) <= 64 << 10
    assert re.search(rf"skipped the first .* of {cluster.folder}/log\n", done.stderr)
    assert answers("logs", "77").stdout.startswith("line 0\n")


@pytest.mark.parametrize("job", ["77", "77_2"])
def test_a_job_that_was_submitted_elsewhere(answers, cluster, job):
    cluster.plays(f'[ "$4" = {job} ] || exit 9; echo one > "$STATE/log"; say COMPLETED None 0:0')
    done = answers("attach", job)
    assert (done.returncode, done.stdout) == (0, "one\n")
    assert done.stderr == f"ddplaunch: job {job} completed (exit code 0)\n"


def test_the_end_of_a_job_comes_from_sacct(answers, cluster, tmp_path):
    cluster.plays("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    answers("submit", "train.py")
    (tmp_path / "slurm-77.out").write_text("one\n")
    write_program(cluster.folder, "bin/sacct", "#!/bin/sh\necho '77|CANCELLED by 1000|0:15'\n").chmod(0o755)
    done = answers("attach", "77")
    assert (done.returncode, done.stdout) == (143, "one\n")
    assert "job 77 was cancelled (exit code 143)" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("attach",), ("no submitted job is on record", "ddplaunch attach NUMBER")),
        (("attach", "wine"), ('no submitted job named "wine"', "ddplaunch ps")),
        (("stop", "77"), ('no run named "77"',)),
    ],
)
def test_jobs_that_are_not_known(answers, words, expected):
    done = answers(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert all(part in done.stderr for part in expected)


def test_an_array_has_indices(answers, cluster):
    answers("submit", "--array", "0-3", "train.py")
    done = answers("attach", "77")
    assert done.returncode == 2
    assert "job 77 is an array " in done.stderr
    assert "ddplaunch attach 77_INDEX" in done.stderr
    cluster.plays('[ "$4" = 77_2 ] || exit 9; say COMPLETED None 0:0')
    assert answers("attach", "77_2").returncode == 0


ARRAY = """
77_0 78 COMPLETED None 0 0 n1
77_1 79 FAILED NonZeroExitCode 768 0 n1
77_2 80 RUNNING None 0 0 n1
77_3 77 PENDING Priority 0 0
""".lstrip()


def test_an_array_is_summed_up(answers, cluster, tmp_path):
    """The ends of its jobs stay known after Slurm has forgotten them."""
    answers("submit", "--array", "0-3", "train.py")
    write_program(cluster.folder, "jobs", ARRAY)
    found = answers("report", "77")
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        "job 77, array 0-3: 1 completed, 1 failed, 1 pending, 1 running",
        "INDEX  STATE                    LOG",
        *(f"{index}      {state:23}  {tmp_path}/slurm-77_{index}.out" for index, state in enumerate(STATES)),
        "one of them: ddplaunch report 77_INDEX",
    ]
    write_program(cluster.folder, "jobs", "77_2 80 COMPLETED None 0 0 n1\n77_3 77 TIMEOUT None 0 0 n1\n")
    found = json.loads(answers("report", "77", "--json").stdout)
    assert (found["state"], found["code"]) == ("2 completed, 2 failed", 143)
    assert [each["code"] for each in found["jobs"]] == [0, 3, 0, 143]
    (cluster.folder / "jobs").unlink()
    assert "2 completed, 2 failed" in answers("ps").stdout
    cluster.plays("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert "job 77_1 failed (exit code 3)" in answers("stop", "77_1").stderr
    for page in (["--html", "page.html"], ["--serve"]):
        refused = answers("report", "77", *page)
        message, hint = refused.stderr.splitlines()
        assert (refused.returncode, message) == (2, f"Error: {page[0]}: job 77 is an array of --array 0-3")
        assert hint == "  name one by its index: ddplaunch report 77_INDEX"


STATES = ("completed (exit code 0)", "failed (exit code 3)", "running", "waits: Priority")


def test_ps_asks_slurm_once(answers, cluster):
    """One query has all jobs, also those that Slurm does not know."""
    for number in (77, 78, 79):
        cluster.environ["ANSWER"] = str(number)
        answers("submit", *(["--array", "0-1"] if number == 79 else []), "train.py")
    write_program(
        cluster.folder, "jobs", "77 77 FAILED None 9 0 n1\n79_0 80 RUNNING None 0 0 n1\n79_1 79 PENDING None 0 0\n"
    )
    states = re.findall(r"(?m)^7[789] .* train.py +(.*)$", answers("ps").stdout)
    assert states == ["1 pending, 1 running", "ended; Slurm no longer knows how", "failed (exit code 137)"]
    (asked,) = cluster.read("asked").splitlines()
    assert "--jobs=79,78,77" in asked
    assert not (cluster.folder / "step-0").exists()


def test_a_scheduler_that_is_slow_has_one_deadline(cluster, monkeypatch):
    monkeypatch.setenv("PATH", cluster.environ["PATH"])
    write_program(cluster.folder, "bin/squeue", "#!/bin/sh\nexec sleep 600\n")
    began = time.monotonic()
    assert Slurm().query([JobId("77"), JobId("78", "other"), JobId("79", index="")], 0.1) is None
    assert time.monotonic() - began < scaled_timeout(5)


def test_a_controller_that_is_down(answers, cluster, tmp_path):
    """It is reported at once, and the log is shown without the controller."""
    answers("submit", "train.py")
    write_program(tmp_path, "slurm-77.out", "one\n")
    write_program(cluster.folder, "down", "")
    cluster.plays("exec sleep 600")
    for words in (("stop", "77"), ("attach", "77"), ("report", "77"), ("stop", "77", "--now")):
        done = answers(*words)
        assert (done.returncode, done.stdout) == (69, "")
        assert "Slurm's controller is down: Slurmctld(primary) at n0 is DOWN\n" in done.stderr
    assert not (cluster.folder / "cancelled").exists()
    assert "Slurm's controller is down" in answers("ps").stdout
    assert answers("logs", "77").stdout == "one\n"
    cluster.environ["PATH"] = "/nowhere"
    assert answers("logs", "77").stdout == "one\n"


def test_the_end_of_a_followed_job_is_recorded(answers, cluster, tmp_path):
    """So it is if Slurm has requeued the job since."""
    cluster.plays("say FAILED NonZeroExitCode 3:0")
    assert answers("submit", "--follow", "train.py").returncode == 3
    assert (kept(tmp_path)["code"], kept(tmp_path)["ended"]) == (3, "failed (exit code 3)")
    write_program(tmp_path, "slurm-77.out", "before\n")
    cluster.plays("say RUNNING None 0:0", 'echo two > "$STATE/log"; say RUNNING None 0:0', "say COMPLETED None 0:0")
    assert answers("logs", "77", "--follow").stdout == "two\n"
    assert kept(tmp_path)["code"] == 0


def test_a_job_that_never_was(answers, cluster):
    cluster.plays("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    done = answers("attach", "999")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: Slurm does not know job 999, and it was not submitted here\n")


def test_no_record_where_none_is_wanted(answers, tmp_path):
    done = answers("submit", "--no-history", "train.py")
    assert done.stdout.splitlines()[-2:] == ["follow: ddplaunch attach 77", "cancel: scancel 77"]
    assert not (tmp_path / "state").exists()


def test_a_site_that_allows_no_step(answers, cluster):
    answers("submit", "train.py")
    cluster.plays("say RUNNING None 0:0")
    refusal = "srun: error: Unable to create step for job 77: Access/permission denied"
    write_program(cluster.folder, "bin/srun", f"#!/bin/sh\necho '{refusal}' >&2; exit 1\n").chmod(0o755)
    done = answers("stacks", "77")
    assert (done.returncode, done.stdout) == (69, "")
    reason = "Unable to create step for job 77: Access/permission denied"
    assert f"Slurm did not start a step in job 77: {reason}" in done.stderr
    assert "may not allow srun --overlap" in done.stderr
    write_program(cluster.folder, "jobs", "77 77 RUNNING None 0 0 n1\n")
    assert answers("ps").stdout.splitlines()[-1].split()[-3:] == ["-", "train.py", "running"]


def test_a_container_is_not_entered(answers, cluster):
    answers("submit", "--container-image", "img", "train.py")
    cluster.plays(*["say RUNNING None 0:0"] * 2)
    done = answers("stacks", "77")
    assert (done.returncode, "job 77 runs in a container" in done.stderr) == (2, True)
    assert "ddplaunch attach 77" in done.stderr
    assert "--html: the record of job 77 is on its first node\n" in answers("report", "77", "--html", "a.html").stderr


def test_attach_ends_at_once_if_slurm_does_not_answer(answers, run_in_fork, cluster, tmp_path):
    cluster.plays("echo 'Unable to contact slurm controller' >&2; exit 1")
    done = answers("attach", "99")
    assert (done.returncode, done.stdout) == (69, "")
    assert "scontrol does not answer: the state of job 99 is unknown" in done.stderr
    missing = run_in_fork("attach", "99", env={**cluster.environ, "PATH": str(tmp_path)})
    assert missing.returncode == 69
    assert "scontrol is not on PATH" in missing.stderr
