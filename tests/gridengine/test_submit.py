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
from tests.slurm.test_submit import number_of
from tests.starts import LIGHT

pytestmark = pytest.mark.ci

PROGRAM = """
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.uname().nodename, *sys.argv[1:], flush=True)
if "fail" in sys.argv and os.environ["RANK"] == "3":
    sys.exit(7)
if "wait" in sys.argv:
    time.sleep(600)
"""


@pytest.fixture
def cluster(network: Callable[..., Network], tmp_path: Path) -> Iterator[GridEngine]:
    """Two compute nodes, or a skip."""
    if reason := unsupported():
        pytest.skip(f"NO GRID ENGINE HERE: {reason}")
    with GridEngine(network(3), tmp_path) as cluster:
        yield cluster


def submit(cluster: GridEngine, folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start ``ddplaunch submit --follow`` for two nodes of two ranks."""
    return cluster.login.start(
        command("submit", "--scheduler", "sge", "--nodes", "2", "--follow", "--nproc", "2", *LIGHT, *words),
        cwd=folder,
        env={**clean_environment(), **cluster.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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
