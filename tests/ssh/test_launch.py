"""``ddplaunch.launch`` on hosts that only SSH leads to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ddplaunch
from tests.conftest import clean_environment, write
from tests.patience import patience

pytestmark = [pytest.mark.ci, pytest.mark.slow]

PROGRAM = """
import os
import socket
import sys

import torch
import torch.distributed as dist

from ddplaunch import RankFailed, launch


def total(factor):
    dist.init_process_group("gloo")
    value = torch.tensor(factor * dist.get_rank())
    dist.all_reduce(value)
    print("at", socket.gethostname())
    return socket.gethostname(), int(value)


def fail():
    if os.environ["RANK"] == "1":
        raise ValueError("no luck")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        node = {"nnodes": 2, "node_rank": int(sys.argv[1]), "master_addr": sys.argv[2], "token": "x" * 20}
        print(launch(total, 10, nproc=1, **node))
    else:
        print(launch(total, 10, hosts="n1:1,n0:2"))
        try:
            launch(fail, hosts="n0:1,n1:1")
        except RankFailed as error:
            print(error.rank, error.host, repr(error.__cause__))
"""


def begin(host, folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    root = str(Path(ddplaunch.__file__).parents[1])
    env = clean_environment({**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **variables})
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "stdin": subprocess.DEVNULL}
    return host.start([sys.executable, "program.py", *words], cwd=folder, env=env, **options)


def test_ranks_on_two_hosts(sshd, tmp_path):
    """What they return comes in order of ranks, and what one raised; nothing stays in the shared folder."""
    servers = sshd(2)
    folder = tmp_path / "shared"
    folder.mkdir()
    write(folder, "program.py", PROGRAM)
    said, error = begin(servers.network.hosts[0], folder, **servers.environment).communicate(timeout=patience(100))
    lines = said.splitlines()
    assert sorted(lines[:3]) == ["[0] at n1", "[1] at n0", "[2] at n0"], error
    assert lines[3:] == ["[('n1', 30), ('n0', 30), ('n0', 30)]", "1 n1 ValueError('no luck')"], error
    assert [name for name in os.listdir(folder) if name.startswith("ddplaunch-")] == []


def test_a_program_on_each_node(network, tmp_path):
    """Each gets what the ranks of its own node returned."""
    hosts = network(2).hosts
    write(tmp_path, "program.py", PROGRAM)
    programs = [begin(host, tmp_path, str(number), hosts[0].address) for number, host in enumerate(hosts)]
    told = [program.communicate(timeout=patience(100)) for program in programs]
    assert [said.splitlines()[-1:] for said, _ in told] == [["[('n0', 10)]"], ["[('n1', 10)]"]], told
