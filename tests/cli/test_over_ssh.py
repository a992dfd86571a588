"""What ``--hosts`` and its like make of a command line, without a host to reach."""

from __future__ import annotations

import json
import shlex

import pytest

from ddplaunch.cli.over_ssh import carried
from ddplaunch.errors import UsageError
from tests.conftest import write

REFUSED = [
    ("--hosts ''", "--hosts names no host"),
    ("--hosts a,a", "a is named twice"),
    ("--hosts a:0", "0 slots"),
    ("--hostfile none", "--hostfile none: No such file"),
    ("--hostfile train.py", "train.py:1: "),
    ("--hosts a --hostfile b", "--hosts and --hostfile contradict each other"),
    ("--include a", "--include goes with --hosts"),
    ("--exclude a", "--exclude goes with --hosts"),
    ("--env A=1", "--env goes with --hosts"),
    ("--remote-python x", "--remote-python goes with --hosts"),
    ("--hosts a,b --include a --exclude b", "--include and --exclude contradict each other"),
    ("--hosts a,b --nnodes 2", "--nnodes and --hosts contradict each other"),
    ("--hosts a,b --node-rank 0", "--node-rank and --hosts contradict each other"),
    ("--hosts a,b --control none", "--control none and --hosts contradict each other"),
    ("--hosts a,b --stdin 0", "--stdin and --hosts contradict each other"),
    ("--hosts a,b --cluster slurm", "--cluster and --hosts contradict each other"),
    ("--hosts a:2,b --nproc 2", "--nproc 2 and the slots of the hosts contradict each other"),
    ("--hosts a:4,b --include a:0 --gpus 1", "--gpus 1 and the slots chosen contradict each other"),
    ("--hosts localhost,b", "localhost is another machine for each"),
    ("--hosts a --env 1A=2", "'1A' is no variable's name"),
    ("--hosts a --env NO_SUCH_VARIABLE", "there is no such variable here"),
]


@pytest.mark.parametrize(("line", "complaint"), REFUSED)
def test_what_makes_no_sense(launch, tmp_path, line, complaint):
    write(tmp_path, "train.py", "open('started', 'w') ; 1\n")
    done = launch("run", *shlex.split(line), "train.py")
    assert done.returncode == 2
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) <= 3
    assert not (tmp_path / "started").exists()


def test_no_ssh_here(launch, tmp_path):
    write(tmp_path, "train.py", "")
    done = launch("run", "--hosts", "a", "train.py", env={"PATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs ssh, and there is none on PATH" in done.stderr


def test_dry_run(launch, tmp_path):
    write(tmp_path, "train.py", "")
    words = ["--hosts", "n[1-2]:2,n9:1", "--exclude", "n9", "--env", "A=1", "--dry-run"]
    done = launch("run", *words, "--json", "train.py", env={"SLURM_JOB_ID": "7"})
    plan = json.loads(done.stdout)
    assert (plan["nnodes"], plan["world_size"], plan["master_addr"]) == (2, 4, "n1")
    shown = launch("run", *words, "train.py").stdout
    assert "over SSH: node 0 is n1, node 1 is n2" in shown
    assert "--hosts" not in shown


def test_variables_that_go_along():
    ours = {
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
        "OMP_NUM_THREADS": "2",
        "LD_LIBRARY_PATH": "/x",
        "PYTHONPATH": "/y",
    }
    rest = {"PATH": "/bin", "HOME": "/root", "HF_TOKEN": "s", "MASTER_ADDR": "a", "RANK": "0", "UID": "0"}
    assert carried((), {**ours, **rest}) == ours
    assert carried(("HF_TOKEN", "A=b=c", "EMPTY=", "NCCL_DEBUG=WARN"), {**ours, **rest}) == {
        **ours,
        "HF_TOKEN": "s",
        "A": "b=c",
        "EMPTY": "",
        "NCCL_DEBUG": "WARN",
    }
    with pytest.raises(UsageError):
        carried(("A B=1",), ours)
