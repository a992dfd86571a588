"""``ddplaunch submit --scheduler sge`` with a real qsub: from the login host to the ranks and back to an exit code."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import clean_environment, command, write
from tests.gridengine.cluster import GridEngine, unsupported
from tests.hosts.network import Network
from tests.patience import patience
from tests.slurm.test_attach import OWN
from tests.slurm.test_submit import number_of
from tests.starts import LIGHT

pytestmark = pytest.mark.ci

PROGRAM = """
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.uname().nodename, *sys.argv[1:], flush=True)
if "wait" in sys.argv:
    time.sleep(600)
while "go" in sys.argv and not os.path.exists("go"):
    time.sleep(0.05)
if "fail" in sys.argv and os.environ["RANK"] == "3":
    sys.exit(7)
"""


@pytest.fixture
def cluster(network: Callable[..., Network], tmp_path: Path) -> Iterator[GridEngine]:
    """Two compute nodes, or a skip."""
    if reason := unsupported():
        pytest.skip(f"NO GRID ENGINE HERE: {reason}")
    with GridEngine(network(3), tmp_path) as cluster:
        for host in cluster.network.hosts:
            host.run("mkdir", "-m", "700", OWN)
        yield cluster


SUBMIT = ("submit", "--scheduler", "sge", "--nodes", "2", "--nproc", "2", *LIGHT)
"""For two nodes of two ranks."""


def submit(cluster: GridEngine, folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start ``ddplaunch submit --follow``."""
    return start(cluster, folder, *SUBMIT, "--follow", *words)


def start(cluster: GridEngine, folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a command of ours on the login host."""
    state = {"XDG_RUNTIME_DIR": OWN, "XDG_STATE_HOME": f"{folder}/state"}
    return cluster.login.type(command(*words), folder, {**clean_environment(), **cluster.environment, **state})


def test_jobs_on_two_nodes_are_followed_to_their_ends(cluster, tmp_path):
    folder = write(tmp_path, "a job/train.py", PROGRAM).parent
    words = ["--pe", "spread", "train.py", "--", 'it\'s "one"', "$HOME"]
    out, err = submit(cluster, folder, *words).communicate(timeout=patience(60))
    first = re.findall(r"sge: this is node 0 of 2, at (n[12]) \(JOB_ID, DDPLAUNCH_HOSTS, DDPLAUNCH_NODE_RANK;", out)
    assert first in (["n1"], ["n2"]), out + err  # Grid Engine prefers the host with less load
    hosts = [*first * 2, *[other for other in ("n1", "n2") if other not in first] * 2]
    ranks = [f'[{rank}] rank {rank} of 4 on {host} it\'s "one" $HOME' for rank, host in enumerate(hosts)]
    assert sorted(line for line in out.splitlines() if line.startswith("[")) == ranks, out + err
    assert "completed (exit code 0)" in err

    failed = submit(cluster, folder, "--pe", "spread", "train.py", "fail")
    out, err = failed.communicate(timeout=patience(60))
    assert failed.returncode == 7, out + err
    assert out.count("ddplaunch: rank 3 exited with code 7") == 1, "one report for all nodes"

    packed = submit(cluster, folder, "--pe", "packed", "train.py")
    out, err = packed.communicate(timeout=patience(60))
    assert packed.returncode == 2, out + err
    assert "--nodes 2 needs as many hosts, but packed gave 2 slots on: n" in out


def test_a_deleted_job_is_stopped_on_all_nodes(cluster, tmp_path):
    write(tmp_path, "train.py", PROGRAM)
    following = submit(cluster, tmp_path, "--pe", "spread", "train.py", "wait")
    number = number_of(following)
    log = tmp_path / f"sge-{number}.out"
    cluster.wait_until(lambda: log.exists() and log.read_text().count("rank") >= 4, "all ranks")
    cluster.run("qdel", str(number))
    _, err = following.communicate(timeout=patience(60))
    assert following.returncode == 137, err
    assert f"job {number} was killed by signal 9 (exit code 137)" in err
    for host in cluster.nodes:
        cluster.wait_until(lambda host=host: not host.find("train.py"), f"{host.name} to have no rank")


def test_jobs_are_seen_by_a_shell_that_did_not_submit_them(cluster, tmp_path):
    """One runs to its end, and one is deleted while it waits, of which Grid Engine keeps nothing."""

    def type_(*words: str) -> tuple[int, str, str]:
        process = start(cluster, tmp_path, *words)
        out, err = process.communicate(timeout=patience(60))
        return process.returncode, out, err

    def states() -> list[str]:
        jobs = type_("ps")[1].partition("JOB ")[2].partition("\n\n")[0]
        return [line.partition(" train.py go fail ")[2].strip() for line in jobs.splitlines()[1:]]

    write(tmp_path, "train.py", PROGRAM)
    _, out, err = type_(*SUBMIT, "--pe", "spread", "train.py", "go", "fail")
    number = re.findall(r"^job (\d+):", out)[0]
    assert out.splitlines()[-2:] == [f"follow: ddplaunch attach {number}", f"cancel: ddplaunch stop {number}"], err
    log = tmp_path / f"sge-{number}.out"
    cluster.wait_until(lambda: log.exists() and log.read_text().count("] rank") == 4, "all ranks")
    assert type_(*SUBMIT, "--pe", "spread", "--qsub-arg=-h", "--job-name", "held", "train.py", "go", "fail")[0] == 0
    assert states() == ["waits, and is on hold", "running"]
    assert type_("logs", number)[1] == log.read_text()
    assert f"stacks cannot ask the nodes of job {number}" in type_("stacks", number)[2]

    attached = start(cluster, tmp_path, "attach", number)
    assert attached.stdout is not None
    while "] rank" not in attached.stdout.readline():
        pass
    write(tmp_path, "go", "")
    out, err = attached.communicate(timeout=patience(60))
    assert attached.returncode == 7, err
    assert "ddplaunch: rank 3 exited with code 7" in out
    assert err.splitlines()[-1] == f"ddplaunch: job {number} failed (exit code 7)"

    code, _, err = type_("stop", "held")
    assert (code, err.splitlines()[-1].partition(" was ")[2]) == (0, "deleted before it began (exit code 143)"), err
    assert states() == ["was deleted before it began (exit code 143)", "failed (exit code 7)"]
    assert type_("attach", number)[0] == 7
