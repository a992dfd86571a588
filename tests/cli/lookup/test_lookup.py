"""Tests of finding the run that a name on the command line means."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError, host_name
from ddplaunch.cli.lookup import batch_jobs, running_jobs
from ddplaunch.cli.lookup.run_index import find_run, find_running, index_runs
from ddplaunch.cli.lookup.running_jobs import RunningJob
from ddplaunch.core.control_socket import socket_dir
from ddplaunch.core.feature_registry import load_features
from ddplaunch.observe.history import history_store
from ddplaunch.observe.history.run_record import RunState
from ddplaunch.system.schedulers import submitted_jobs
from ddplaunch.system.schedulers.scheduler import BatchJobState, JobId
from ddplaunch.system.schedulers.submitted_job import SubmittedJob
from tests.conftest import assert_refused, wait_until
from tests.core.control_socket.test_server import run, runtime  # noqa: F401
from tests.core.output.sample_records import record
from tests.observe.history.test_history import keep


@pytest.fixture(autouse=True)
def alone(runtime: Path, state: Path, monkeypatch) -> None:  # noqa: F811
    """No other jobs of this user: only doors of this test count."""
    load_features()  # jobs of unknown schedulers are left out
    monkeypatch.setattr(socket_dir, "candidate_dirs", lambda: [str(runtime / "ddplaunch")])


def test_without_runs_lookups_are_refused():
    with pytest.raises(UsageError, match="you have no runs in progress on this machine"):
        find_running(None)
    with pytest.raises(UsageError, match='no run named "x"'):
        find_run("x")


def test_the_only_run_is_found_by_any_part_of_its_name(run):  # noqa: F811
    job = run("train-7")
    for word in (None, "train-7", "train", "in-7", str(job.process.pid)):
        assert find_running(word) == (job.path, "train-7", job.process.pid)
        assert word is None or find_run(word).running == find_running(word)


def test_several_runs_need_a_name(run):  # noqa: F811
    first, second = run("train-a"), run("train-b")
    assert find_running("train-b").pid == second.process.pid
    assert find_running(str(first.process.pid)).run_id == "train-a"
    for word in (None, "train"):
        with pytest.raises(UsageError) as raised:
            find_running(word)
        assert {"train-a", "train-b"} <= {*re.findall(r"train-\w", f"{raised.value.message} {raised.value.hint}")}


def test_two_runs_with_the_same_name(run):  # noqa: F811
    first, second = run("same"), run("same")
    assert {each.run_id for each in running_jobs.list_running()} == {"same"}
    assert {find_running(str(job.process.pid)).path for job in (first, second)} == {first.path, second.path}
    names = list(index_runs().jobs)
    assert len(names) == 2
    assert find_running("same").path == find_run("same").running.path == second.path
    assert {find_running(name).path for name in names} == {first.path, second.path}


def test_a_run_that_has_ended():
    keep(run_id="train-1")
    assert find_run("train").record.run == "train-1"
    with pytest.raises(UsageError, match="train-1 has ended"):
        find_running("train-1")
    with pytest.raises(UsageError) as raised:
        find_run("trian-1")
    assert raised.value.hint == "did you mean train-1?"


def test_a_name_that_begins_others():
    for name in ("a", "a.2", "ab", "xab"):
        keep(run_id=name)
    assert find_run("a").run == "a"
    with pytest.raises(UsageError, match=r'"b" matches 2 runs: .*ab'):
        find_run("b")


def test_a_record_that_cannot_be_read():
    keep(run_id="broken")
    (Path(history_store.run_dir("broken")) / "node-0.jsonl").write_text("{")
    with pytest.raises(UsageError, match="the record of broken cannot be read"):
        find_run("broken")


def test_a_run_id_that_was_there_before():
    """It means the newest of its runs, whatever else changes in their folders; each has a name of its own too."""
    for number in (1, 2, 3):
        keep(run_id="nightly")
        name = "nightly" if number == 1 else f"nightly.{number}"
        os.utime(Path(history_store.history_dir() or "") / name, (10 - number, 10 - number))
    assert list(index_runs().jobs) == ["nightly.1", "nightly.2", "nightly.3"]
    found = [find_run(word).run for word in ("nightly", "night", "nightly.2", "nightly.1")]
    assert found == ["nightly.3", "nightly.3", "nightly.2", "nightly.1"]
    third = find_run("nightly").record.began
    history_store.remove_run("nightly.1")
    keep(run_id="nightly")  # takes the folder that is free
    assert find_run("nightly").record.began > third


def test_a_run_id_that_runs_again(run):  # noqa: F811
    """The new run is found also before it has a record."""
    keep(run_id="nightly")
    job = run("nightly")
    name = f"nightly.{job.process.pid}"
    assert find_run("nightly") == (name, find_running("nightly"), None)
    assert find_running("nightly").pid == job.process.pid
    assert list(index_runs().jobs) == [name, "nightly"]


def test_a_part_of_a_name_that_two_runs_have():
    """Runs with run ids of their own are two runs, even if one name looks like a repetition of the other."""
    keep(run_id="exp")
    keep(run_id="exp.2")
    assert list(index_runs().jobs) == ["exp.2", "exp"]
    assert find_run("exp").run == "exp"
    with pytest.raises(UsageError, match='"ex" matches 2 runs'):
        find_run("ex")


def test_the_newest_has_ended_and_an_earlier_one_runs(run, state):  # noqa: F811
    job = run("nightly")
    keep(run_id="nightly")
    with pytest.raises(UsageError, match="nightly has ended") as raised:
        find_running("nightly")
    assert f"nightly.{job.process.pid}" in (raised.value.hint or "")


@pytest.fixture
def elsewhere(start_ddplaunch, tmp_path_factory):
    """A job whose shell had another folder for control sockets, as shells of SSH, cron and sudo have none."""
    folder = tmp_path_factory.mktemp("x")
    folder.chmod(0o700)
    options = ("--run-id", "night", "--nproc", "2", "--grace", "1")
    program = ("--no-python", "sh", "-c", "echo up; sleep 600")
    job = start_ddplaunch("run", *options, *program, env={"XDG_RUNTIME_DIR": str(folder)})
    job.wait_for("up", 2)
    wait_until(lambda: history_store.read_node_records("night"), "its record")
    return job, folder / "ddplaunch"


def test_a_run_of_a_shell_with_another_runtime_folder(elsewhere, run_in_fork):
    job, _ = elsewhere
    listed = {each["pid"]: (each["run"], each["ranks"]) for each in json.loads(run_in_fork("ps", "--json").stdout)}
    assert listed[job.process.pid] == ("night", [0, 1])
    assert run_in_fork("stacks", str(job.process.pid)).returncode == 0
    done = run_in_fork("stop", "night")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "night has ended")
    assert job.wait() != 0
    assert_refused(run_in_fork("stop", "night"), "night has ended")


def test_a_run_whose_control_socket_was_removed(elsewhere, run_in_fork):
    """As by a cleaner of /tmp: it has not ended."""
    job, folder = elsewhere
    shutil.rmtree(folder)
    what = f"night runs (PID {job.process.pid}), but its launcher has no control socket"
    assert_refused(run_in_fork("stop", "night"), what, f"kill {job.process.pid} stops it")
    assert what in run_in_fork("ps").stderr


@pytest.mark.parametrize(
    ("word", "host", "expected"),
    [
        ("7", "n0.cluster", JobId("7")),
        ("7_2", "n0", JobId("7", index="2")),
        ("7_2", "n9", None),  # another cluster has a job of this number
        ("7.pbs", "n0", None),
        (None, "n0", None),
    ],
)
def test_the_end_of_a_job_from_a_script_of_the_user(monkeypatch, word, host, expected):
    """Slurm may know it: where the launcher was killed with its node, its record says that it still runs."""
    state = BatchJobState("failed", 1, host=host)
    monkeypatch.setattr(batch_jobs, "find_slurm", lambda: "slurm")
    monkeypatch.setattr(batch_jobs, "query_state", lambda which, scheduler: replace(state, job=which))
    share = replace(record(1), job=word, host="n0", ended=None, fate=RunState.RUNNING)
    found = batch_jobs.find_final_state([share])
    assert (found and found.job) == expected
    ends = [each.fate for each in batch_jobs.mark_lost([share, replace(share, host=host_name())], found)]
    assert ends == [RunState.LOST if expected else RunState.RUNNING, RunState.RUNNING]


def test_an_array_is_not_the_run_of_its_last_index(monkeypatch):
    """In Slurm that index has the array's own number, so its run, 7.0, looks like the run of job 7."""
    array = SubmittedJob(
        number="7", cluster=None, name="train.py", target="", nodes=1, array="0-1", cwd="", log="", run_id=None,
        python="", image=None, moment=0.0,
    )  # fmt: skip
    submitted_jobs.save_job(array)
    monkeypatch.setattr(running_jobs, "list_running", lambda: [RunningJob("socket", "7.0", os.getpid())])
    assert batch_jobs.find_batch_job("7") == array
    assert batch_jobs.find_batch_job("7_1") is None, "its own run is here"


def test_an_index_that_an_array_does_not_have():
    array = SubmittedJob(
        number="7", cluster=None, name="train.py", target="", nodes=1, array="0-1", cwd="", log="", run_id=None,
        python="", image=None, moment=0.0,
    )  # fmt: skip
    submitted_jobs.save_job(array)
    with pytest.raises(UsageError, match="job 7 has no index 2: it is an array of --array 0-1"):
        batch_jobs.find_batch_job("7_2")


def test_a_job_that_has_ended_names_its_newest_run(monkeypatch):
    """Also one from a script of the user, whose runs have other names."""
    monkeypatch.setenv("SLURM_JOB_ID", "1367")
    for name in ("old", "new"):
        keep(run_id=name)
    assert find_run("1367").run == "new"
    with pytest.raises(UsageError, match="1367 has ended"):
        find_running("1367")
    with pytest.raises(UsageError, match='no run named "1368"'):
        find_run("1368")


class ArrayInSlurm:
    """A Slurm with array 7, whose first index has failed."""

    def query_one(self, job, seconds):
        return BatchJobState("failed", 3, job=JobId("7", index="0"), number="8")

    def query(self, jobs, seconds):
        ends = [("10", "9", 0), ("0", "8", 3)]
        return {jobs[0]: [BatchJobState("", code, job=JobId("7", index=at), number=raw) for at, raw, code in ends]}

    def why_unavailable(self, cluster=None):
        return None


def test_an_array_from_a_script_of_the_user_is_not_its_last_index(monkeypatch):
    monkeypatch.setattr(batch_jobs, "find_slurm", ArrayInSlurm)
    found = batch_jobs.find_batch_job("7")
    assert found
    assert (found.number, found.array, found.log) == ("7", "0,10", "")


def test_the_numbers_of_runs_of_one_target(run_in_fork):
    """The beginning of a name is enough, but a number is whole: no other run may be stopped in its place."""
    for name in ("train-12", "train-17", "eval-3", "exp1", "20261122-155025-1234"):
        keep(run_id=name)
    words = ("train-17", "eval", "e", "train-1", "12", "3", "exp", "155025")
    found = {word: run_in_fork("report", word) for word in words}
    for word, name in {
        "train-17": "train-17",
        "eval": "eval-3",
        "exp": "exp1",
        "155025": "20261122-155025-1234",
    }.items():
        assert f"\n{name}: succeeded\n" in found[word].stdout
    assert '"e" matches 2 runs: ' in found["e"].stderr
    for word in ("train-1", "12", "3"):
        assert f'no run named "{word}"\n' in found[word].stderr


def test_a_job_is_not_taken_for_one_with_a_longer_number(state, monkeypatch):
    keep(run_id="train-17")
    read = []
    monkeypatch.setattr(history_store, "read_node_records", lambda name: read.append(name) or [])
    assert running_jobs.find_record(RunningJob("", "train-1", 1)) is None
    assert read == []
    running_jobs.find_record(RunningJob("", "train-17", 1))
    assert read == ["train-17"]
