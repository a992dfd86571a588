"""Tests of Grid Engine: the script of a job, reading its programs' output, and ``submit --scheduler sge``."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from ddplaunch.features.submit import gridengine
from ddplaunch.features.submit.batch_job import BatchJob
from ddplaunch.features.submit.gridengine import GridEngine, describe_state, parse_qacct, parse_qstat
from ddplaunch.system.schedulers.scheduler import JobForgotten, JobId
from tests.conftest import run_command, write_program
from tests.features.submit.states import DELETED, HELD
from tests.features.submit.test_scripts import JOBS


@pytest.fixture
def run(tmp_path):
    """Run a script as Grid Engine does on the first of these hosts; its qrsh, like the real one, joins its words.

    The job's Python writes down what it gets, and exits with 7.
    """
    python = f"""
        #!{sys.executable}
        import json, os, sys
        names = ("DDPLAUNCH_HOSTS", "DDPLAUNCH_NODE_RANK")
        with open("node-" + os.environ[names[1]], "w") as file:
            json.dump([sys.argv[3:], [os.environ[name] for name in names], sys.stdin.read()], file)
        sys.exit(7)
        """
    qrsh = """
        #!/bin/bash
        [ "$1 $2" = "-inherit -V" ] || exit 1
        shift 3
        exec /bin/sh -c "$*"
        """
    write_program(tmp_path, "bin/python", python).chmod(0o755)
    write_program(tmp_path, "bin/qrsh", qrsh).chmod(0o755)

    def begin(job: BatchJob, hosts: str) -> tuple[subprocess.CompletedProcess[str], list[list[object]]]:
        write_program(tmp_path, "hostfile", hosts)
        variables = {"PE_HOSTFILE": f"{tmp_path}/hostfile", "PE": "mpi", "NSLOTS": "2"}
        job = replace(job, interpreter=f"{tmp_path}/bin/python", chdir=str(tmp_path), setup=())
        variables["PATH"] = f"{tmp_path}/bin:{os.environ['PATH']}"
        done = run_command(["bash"], tmp_path, variables, input=GridEngine().render_script(job))
        return done, [json.loads(path.read_text()) for path in sorted(tmp_path.glob("node-*"))]

    return begin


def test_every_node_gets_the_words_as_they_were_typed(run):
    done, nodes = run(JOBS["sge_everything"], "n1 4 all.q@n1 UNDEFINED\nn2 2 a.q@n2 UNDEFINED\nn2 2 b.q@n2 UNDEFINED\n")
    assert (done.returncode, done.stderr) == (7, ""), "the exit code of node 0 is the job's"
    words = ["run", "--cluster", "sge", *JOBS["sge_everything"].command]
    assert nodes == [[words, ["n1,n2", "0"], ""], [words, ["n1,n2", "1"], ""]]


def test_slots_that_do_not_make_the_nodes(run):
    done, nodes = run(JOBS["sge_everything"], "n1 8 all.q@n1 UNDEFINED\n")
    assert (done.returncode, nodes) == (2, [])
    assert done.stderr.splitlines() == [
        "ddplaunch: --nodes 2 needs 2 hosts, but mpi gave 2 slots on: n1",
        "  qconf -sp mpi shows how many slots a host gets (allocation_rule); of N: --cpus-per-task N",
    ]


LISTED = """<?xml version='1.0'?>
<job_info  xmlns:xsd="http://arc.liv.ac.uk/repos/darcs/sge/source/dist/util/resources/schemas/qstat/qstat.xsd">
  <queue_info>
    <job_list state="running">
      <JB_job_number>7</JB_job_number>
      <state>r</state>
      <queue_name>all.q@n1</queue_name>
    </job_list>
    <job_list state="running">
      <JB_job_number>18</JB_job_number>
      <state>r</state>
      <queue_name>all.q@n2</queue_name>
      <tasks>2</tasks>
    </job_list>
  </queue_info>
  <job_info>
    <job_list state="pending">
      <JB_job_number>17</JB_job_number>
      <state>Eqw</state>
      <queue_name></queue_name>
    </job_list>
    <job_list state="pending">
      <JB_job_number>18</JB_job_number>
      <state>qw</state>
      <tasks>3-5:2,9</tasks>
    </job_list>
  </job_info>
</job_info>
"""


def test_states_are_parsed_from_one_qstat():
    """One qstat gives the states of all jobs; of an array, those of each index that waits or runs."""
    running, second, broken, *others = parse_qstat(LISTED)
    assert (running.job, running.is_running, running.host) == (JobId("7"), True, "n1")
    assert running.description == "is running"
    assert (broken.is_pending, broken.is_running) == (True, False)
    array = [(each.number, each.is_pending) for each in (second, *others)]
    assert array == [("18_2", False), ("18_3", True), ("18_5", True), ("18_9", True)]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("qw", "waits"), ("hqw", HELD), ("r", "is running"), ("dr", "is being deleted"),
        ("Rq", "was requeued and waits"), ("Rr", "is running again"), ("S", "is suspended"),
        ("Eqw", "is in an error state, Eqw, and will not start: qstat -explain E says why"),
    ],
)  # fmt: skip
def test_the_description_of_a_state(state, expected):
    assert describe_state(state) == expected


ACCOUNTED = """==============================================================
qname        all.q
hostname     n2
jobnumber    7
failed       0
exit_status  {task}
==============================================================
qname        all.q
hostname     n1
jobnumber    7
failed       {failed}
exit_status  {code}
ru_wallclock 1s
"""


@pytest.mark.parametrize(
    ("failed", "code", "ended"),
    [
        ("0", "0", (0, "completed")),
        ("0", "7", (7, "failed")),
        ("100 : assumedly after job", "137                  (Killed)", (137, "was killed by signal 9")),
        ("37  : qmaster enforced h_rt, h_cpu, or h_vmem limit", "137", (143, "reached its time limit")),
        ("26  : opening input/output file", "0", (1, "failed: Grid Engine reports 26  : opening input/output file")),
    ],
)
def test_the_end_of_a_job_is_parsed_from_qacct(failed, code, ended):
    (record,) = parse_qacct(ACCOUNTED.format(task="1", failed=failed, code=code), "7")
    assert (record.code, record.description) == (ended[0], f"{ended[1]} (exit code {ended[0]})")


def test_how_an_array_ended():
    """The last record of an index counts (from qacct 8.1.9: index 1 was restarted, and index 2 will be)."""
    again = "taskid       {}\nfailed       25  : rescheduling\nexit_status  99                  \n"
    ended = "taskid       1\nfailed       0    \nexit_status  4                   \n"
    records = parse_qacct(f"{'=' * 60}\n".join(["", again.format(1), again.format(2), ended]), "3")
    assert [(each.number, each.code) for each in records] == [("3_1", 4)]


def test_records_with_empty_fields():
    empty = "failed           \nexit_status      \n"
    assert parse_qacct(empty, "3") == []
    (record,) = parse_qacct(f"{empty}{'=' * 60}\nfailed           \nexit_status  4   \n", "3")
    assert record.code == 4


def test_jobs_that_qstat_does_not_list_any_more(tmp_path, monkeypatch):
    """qacct never lists one that was deleted while it waited; of a job that has run, the exit status comes later."""
    assert parse_qacct("no jobs running since startup\n", "7") == []
    for name, text in (("qstat", "cat listed"), ("qacct", "cat accounted"), ("qdel", "echo $* >> typed")):
        write_program(tmp_path, name, f"#!/bin/sh\ncd {tmp_path}\n{text}\n").chmod(0o755)
    write_program(tmp_path, "listed", LISTED)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    scheduler, jobs = GridEngine(), [JobId("7"), JobId("17"), JobId("18", index="3"), JobId("18", index="9")]
    assert [scheduler.query_one(job).is_pending for job in jobs] == [False, True, True, True]
    for job in jobs[:3]:
        scheduler.cancel(job)
    write_program(tmp_path, "listed", "")
    unknown = "has ended; qacct does not show it yet"
    assert [scheduler.query_one(job).description for job in jobs] == [unknown, DELETED, DELETED, unknown]
    assert [scheduler.query_one(jobs[0]).ended_unknown, scheduler.query_one(jobs[0]).code] == [True, None]
    assert (tmp_path / "typed").read_text() == "7\n17\n18 -t 3\n"
    monkeypatch.setattr(gridengine, "ACCOUNTING_DELAY_S", -1.0)
    with pytest.raises(JobForgotten, match="no longer knows job 7; its exit status is unknown"):
        scheduler.query_one(jobs[0])
    write_program(tmp_path, "accounted", ACCOUNTED.format(task="2", failed="0", code="0"))
    assert scheduler.query_one(jobs[0]).description == "completed (exit code 0)"


@pytest.mark.parametrize(("everywhere", "hosts"), [(True, ["n1", "n2"]), (False, ["n9"])])
def test_a_command_on_the_hosts_of_a_job(tmp_path, monkeypatch, everywhere, hosts):
    write_program(tmp_path, "listed", LISTED.replace(">18<", ">7<").replace("<tasks>2</tasks>", ""))
    qrsh = 'shift 3; echo "$1 $JOB_ID $SGE_TASK_ID" >> typed; shift; sh -c "$*"'  # it joins words
    for name, text in ("qstat", "cat listed"), ("qrsh", qrsh), ("python", 'echo "$OLDPWD $4"; exit 3'):
        write_program(tmp_path, name, f"#!/bin/sh\ncd {tmp_path}\n{text}\n").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job, state = SimpleNamespace(cwd="/", python=f"{tmp_path}/python"), SimpleNamespace(job=JobId("7"), host="n9")
    words, env = GridEngine().step_command(job, state, ["ps", "a  b"], everywhere=everywhere)
    done = run_command(words, tmp_path, env)
    assert (done.returncode, done.stdout) == (3, "/ a  b\n" * len(hosts))
    assert sorted((tmp_path / "typed").read_text().splitlines()) == [f"{host} 7 undefined" for host in hosts]


def test_a_file_may_choose_grid_engine(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    write_program(tmp_path, "pyproject.toml", '[tool.ddplaunch.submit]\nscheduler = "sge"\npe = "mpi"\n')
    done = run_in_fork("submit", "--dry-run", "--nodes", "2", "--time", "1:30:00", "train.py")
    assert done.returncode == 0, done.stderr
    assert "#$ -pe mpi 2\n#$ -l h_rt=5400\n" in done.stdout
    odd = run_in_fork("submit", "--dry-run", "--nodes", "2", "--output", "a'\"b", "train.py")
    assert "does not fit in one line of a batch script\n  leave line breaks and quotes out\n" in odd.stderr
