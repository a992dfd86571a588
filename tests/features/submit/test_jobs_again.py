"""Tests of showing and stopping jobs of PBS and LSF from a shell that did not submit them.

tests/gridengine does so with a real Grid Engine, tests/slurm with a real Slurm.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from ddplaunch.system.schedulers.scheduler import ACCOUNTING_DELAY_S
from tests.conftest import assert_refused, wait_until, write_program
from tests.constant_override import write_launcher
from tests.features.submit.queue_programs import PROGRAMS_OF, Job, install
from tests.features.submit.states import DELETED, KILLED, SHORT_INTERVALS
from tests.fork_server import HOST
from tests.start_modes import LIGHT

TRAIN = """
import os, sys, time
print("rank", os.environ["RANK"], flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
sys.exit(3 if os.environ["RANK"] == "1" else 0)
"""

TITLES = {"pbs": "PBS", "lsf": "LSF"}
WHY = {"pbs": "waits: Not Running: Insufficient amount of resource: ncpus", "lsf": "waits"}
STOPPED = {"pbs": "failed (exit code 143)", "lsf": "was killed: LSF reports TERM_OWNER (exit code 130)"}
NEVER_BEGAN = {"pbs": DELETED, "lsf": KILLED}


class Login:
    """A login host with one scheduler. Its "nodes" are this machine too, with another name and doors of their own."""

    def __init__(self, scheduler: str, folder: Path, doors: str, answer) -> None:
        self.scheduler, self.folder, self.doors, self._answer = scheduler, folder, doors, answer
        self.env = {
            **SHORT_INTERVALS,
            **install(folder / "site", *PROGRAMS_OF[scheduler]),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_RUNTIME_DIR": str(folder / "login"),
            HOST: "login",
        }
        write_program(folder, "bin/srun", f"#!/bin/sh\ntouch {folder}/slurm\n").chmod(0o755)
        for name in ("scontrol", "squeue", "scancel", "sacct"):
            (folder / "bin" / name).symlink_to("srun")
        self.env["PATH"] += f":{folder}/bin"

    def type(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self._answer(*words, env={**self.env, **env})

    def launcher(self) -> Path:
        """Write the command for what runs beside the test."""
        return write_launcher(
            self.folder,
            """
            import os
            from ddplaunch.system.schedulers import log_follower

            log_follower.MIN_QUERY_INTERVAL_S = log_follower.LOG_POLL_INTERVAL_S = 0.1
            seen = os.uname()
            os.uname = lambda: os.uname_result((seen.sysname, "login", *seen[2:]))
            """,
        )

    def submit(self, *words: str) -> str:
        size = ("--scheduler", self.scheduler, "--nodes", "2", "--nproc", "1", *LIGHT)
        done = self.type("submit", *size, *words, "train.py", XDG_RUNTIME_DIR=self.doors)
        assert done.returncode == 0, done.stderr
        self.submit_output = done.stdout.splitlines()
        return re.findall(r"^job (\S+):", done.stdout)[0]

    def begun(self) -> str:
        """Wait for the ranks of the job submitted last; return what its log says until then."""
        log = Path(next(line for line in self.submit_output if line.startswith("log: ")).removeprefix("log: "))
        wait_until(lambda: log.exists() and log.read_text().count("] rank") == 2, "the ranks")
        return log.read_text()

    def shown(self, number: str) -> dict[str, object]:
        """The job in ``ps --json``, which has its runs of this name too."""
        found = json.loads(self.type("ps", "--json").stdout)
        return next(each for each in found if each["run"] == number and each["pid"] is None)

    def state(self, number: str) -> str:
        """The last column of ``ps``."""
        line = next(line for line in self.type("ps").stdout.splitlines() if re.match(rf"{number} .* ago ", line))
        return line.partition(" train.py ")[2].strip()


@pytest.fixture(params=PROGRAMS_OF)
def login(request, tmp_path, run_in_fork):
    """A login host; at the end no program of Slurm's has been called."""
    write_program(tmp_path, "train.py", TRAIN)
    with tempfile.TemporaryDirectory() as doors:  # a socket's path is short
        yield Login(request.param, tmp_path, doors, run_in_fork)
        write_program(tmp_path, "go", "")
        jobs = [Job(tmp_path / "site", path.name) for path in (tmp_path / "site" / "jobs").iterdir()]
        wait_until(lambda: all(job.waits or job.status is not None for job in jobs), "the end of all jobs")
    assert not (tmp_path / "slurm").exists()


@pytest.mark.slow
def test_a_job_is_followed_again(login, start_ddplaunch, tmp_path):
    number = login.submit()
    assert login.submit_output[-2:] == [f"follow: ddplaunch attach {number}", f"cancel: ddplaunch stop {number}"]
    log = login.begun()
    short = number.partition(".")[0]
    shown = login.shown(number)
    assert (shown["state"], shown["code"], shown["world_size"]) == ("is running", None, None)
    assert login.state(number) == "running"
    assert login.type("logs", short).stdout == log
    for words in (("stacks",), ("logs", "--rank", "1")):
        system = TITLES[login.scheduler]
        expected = f"{words[0]} cannot reach the nodes of job {number}: {system} cannot start a step in a running job"
        hint = f"log in to one of them with SSH and run there: ddplaunch {words[0]}\n"
        assert_refused(login.type(words[0], number, *words[1:]), expected, hint)
    assert "running" in login.type("report", number).stdout, "its home is this one's"

    attached = start_ddplaunch("attach", short, env=login.env, executable=login.launcher())
    attached.wait_for("] rank")
    write_program(tmp_path, "go", "")
    assert attached.wait() == 3, attached.stderr()
    assert "ddplaunch: rank 1 exited with code 3" in attached.stdout()
    assert attached.stderr().splitlines()[-1] == f"ddplaunch: job {number} failed (exit code 3)"

    shutil.rmtree(tmp_path / "site" / "jobs" / number)  # the scheduler has forgotten it
    again = login.type("attach", "train.py")
    assert (again.returncode, again.stderr) == (3, f"ddplaunch: job {number} failed (exit code 3)\n")
    assert "rank 1 exited with code 3" in again.stdout
    assert login.shown(number)["state"] == "failed (exit code 3)"
    assert "rank 1 exited with code 3" in login.type("report", number).stdout
    stopped = login.type("stop", number)
    assert (stopped.returncode, stopped.stderr.splitlines()[0]) == (2, f"Error: job {number} failed (exit code 3)")


@pytest.mark.slow
def test_a_job_is_stopped(login):
    """``stop`` calls the scheduler, and the history shows the end; --now is refused."""
    number = login.submit()
    login.begun()
    assert_refused(login.type("stop", number, "--now"), f"--now does not work on job {number}: ")
    stopped = login.type("stop", number)
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stderr.endswith(f"stopping job {number}\njob {number} {STOPPED[login.scheduler]}\n")
    assert login.state(number) == STOPPED[login.scheduler]


@pytest.mark.slow
def test_an_array(login, tmp_path):
    """Each job of an array has its own index, log, port and end; the scheduler is queried once about all."""
    variable = {"pbs": "PBS_ARRAY_INDEX", "lsf": "LSB_JOBINDEX"}[login.scheduler]
    write_program(tmp_path, "train.py", TRAIN.replace('"rank",', f'"index", os.environ["{variable}"], "rank",'))
    number = login.submit("--array", "1-2", "--time", "1:00:00")
    short, dot, server = number.partition(".")
    assert login.submit_output[-2:] == [
        f"follow: ddplaunch attach {short}_INDEX{dot}{server}",
        f"cancel: ddplaunch stop {number}",
    ]
    pattern = login.submit_output[1].removeprefix("log: ")
    logs = {index: Path(pattern.replace("%a", index)) for index in "12"}
    for index, log in logs.items():
        wait_until(lambda log=log: log.exists() and log.read_text().count("] index") == 2, "the ranks")
        assert log.read_text().count(f"] index {index} rank") == 2, log.read_text()
    login.submit("--partition", "full")
    (tmp_path / "site" / "asked").write_text("")
    assert login.state(number) == "2 running"
    asked = (tmp_path / "site" / "asked").read_text().splitlines()
    assert len(asked) == 1, asked
    assert login.type("logs", f"{short}_2").stdout == logs["2"].read_text()
    stopped = login.type("stop", f"{short}_2")
    assert (stopped.returncode, STOPPED[login.scheduler] in stopped.stderr) == (0, True), stopped.stderr
    assert login.state(number) == "1 failed, 1 running"
    write_program(tmp_path, "go", "")
    assert login.type("attach", f"{short}_1").returncode == 3
    found = login.type("report", number)
    assert found.stdout.splitlines()[0] == f"job {number}, array 1-2: 2 failed", found.stderr
    effective, fate, *_ = login.type("report", f"{short}_1").stdout.splitlines()
    assert effective.startswith("goodput ")
    assert fate == f"{short}_1{dot}{server}: failed with exit code 3"


@pytest.mark.ci
def test_waiting_for_a_job_and_an_array(login, start_ddplaunch, tmp_path):
    """One index fails, and the last one does not: an array has failed then."""
    index = {"pbs": "PBS_ARRAY_INDEX", "lsf": "LSB_JOBINDEX"}[login.scheduler]
    write_program(tmp_path, "train.py", TRAIN.replace('"1" else', f'"1" and os.environ["{index}"] == "1" else'))
    number = login.submit("--array", "1-2")
    short = number.partition(".")[0]
    words = (number, f"{short}_1", f"{short}_2")
    waiting = [start_ddplaunch("wait", each, env=login.env, executable=login.launcher()) for each in words]
    log = Path(login.submit_output[1].removeprefix("log: ").replace("%a", "1"))
    wait_until(lambda: log.exists() and log.read_text().count("] rank") == 2, "the ranks")
    write_program(tmp_path, "go", "")
    assert [each.wait() for each in waiting] == [3, 3, 0], [each.stderr() for each in waiting]
    assert waiting[0].stderr() == f"job {number}: 1 completed, 1 failed\n"
    assert [login.type("wait", each).returncode for each in words] == [3, 3, 0]
    assert_refused(login.type("wait", f"{short}_3"), f"job {number} has no index 3: it is an array of --array 1-2")
    assert_refused(login.type("stop", number), f"job {number} has ended: 1 completed, 1 failed")

    number = login.submit("--partition", "full")
    waiting = [start_ddplaunch("wait", "train.py", env=login.env, executable=login.launcher())]
    assert login.type("stop", number).returncode == 0
    assert waiting[0].wait() == 143, waiting[0].stderr()
    assert waiting[0].stderr() == f"job {number} {NEVER_BEGAN[login.scheduler]}\n"


def test_a_job_that_waits(login, tmp_path):
    number = login.submit("--partition", "full", "--no-history")
    follow, cancel = login.submit_output[-2:]
    assert follow.startswith(f"follow: tail -n +1 -F {tmp_path}/")
    assert cancel == f"cancel: {PROGRAMS_OF[login.scheduler][2]} {number}"
    assert not (tmp_path / "state").exists()
    number = login.submit("--partition", "full")
    assert login.shown(number)["state"] == WHY[login.scheduler]
    waiting = login.type("stacks", number)
    assert (waiting.returncode, f"job {number} {WHY[login.scheduler]}: no rank runs" in waiting.stderr) == (2, True)
    assert login.type("stop", "train.py").returncode == 0
    assert login.state(number) == NEVER_BEGAN[login.scheduler]
    attached = login.type("attach", number)
    assert (attached.returncode, attached.stderr) == (143, f"ddplaunch: job {number} {NEVER_BEGAN[login.scheduler]}\n")
    shown = login.type("logs", number)
    assert shown.returncode == 1
    assert f"job {number} {NEVER_BEGAN[login.scheduler]}; it has no record and no log on this machine" in shown.stderr


def test_a_job_that_its_scheduler_has_forgotten(login, tmp_path):
    number = login.submit("--partition", "full")
    system = TITLES[login.scheduler]
    write_program(tmp_path, "site/bin/bhist", "#!/bin/sh\necho 'No matching job found' >&2\n").chmod(0o755)
    cancels = tmp_path / "site" / "bin" / PROGRAMS_OF[login.scheduler][2]
    cancels.write_text(f"#!/bin/sh\nrm -r {tmp_path}/site/jobs/$1\n")
    assert login.type("stop", number).stderr.endswith(f"job {number} ended; {system} no longer knows how\n")
    number = login.submit("--partition", "full", "--job-name", "other")
    shutil.rmtree(tmp_path / "site" / "jobs" / number)
    attached = login.type("attach", number)
    assert attached.returncode == 1
    assert f"{system} no longer knows job {number}; its exit status is unknown" in attached.stderr
    assert login.state(number) == f"ended; {system} no longer knows how"
    assert login.shown(number)["code"] == 1


def test_a_machine_without_the_scheduler(login, tmp_path):
    number = login.submit("--partition", "full")
    asked = PROGRAMS_OF[login.scheduler][1]
    (tmp_path / "site" / "bin" / asked).unlink()
    path = f"{tmp_path}/site/bin:{tmp_path}/bin"  # a real Grid Engine has a qstat too
    missing = login.type("attach", number, PATH=path)
    assert missing.returncode == 69
    assert f"{asked} is not on PATH: " in missing.stderr
    assert f"{asked} does not answer" in login.type("ps", PATH=path).stdout


def test_a_job_of_grid_engine_that_qacct_never_shows(run_in_fork, tmp_path):
    """The queries end for a job without a record in qacct, such as one that was deleted while it waited."""
    for name, lines in {"qsub": "echo 4711", "qstat": "echo '<job_info/>'", "qacct": "exit 1"}.items():
        write_program(tmp_path, f"bin/{name}", f"#!/bin/sh\n{lines}\n").chmod(0o755)
    write_program(tmp_path, "train.py", "")
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "XDG_STATE_HOME": str(tmp_path)}
    assert run_in_fork("submit", "--scheduler", "sge", "--pe", "mpi", "train.py", env=env).returncode == 0
    assert "qacct does not show it" in run_in_fork("ps", env=env).stdout
    kept = tmp_path / "ddplaunch" / "submitted" / "sge.4711.json"
    job = json.loads(kept.read_text())
    kept.write_text(json.dumps({**job, "gone": job["gone"] - ACCOUNTING_DELAY_S}))
    assert "ended; Grid Engine no longer knows how" in run_in_fork("ps", env=env).stdout
    assert json.loads(kept.read_text())["code"] == 1
