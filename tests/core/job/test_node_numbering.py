"""Tests of nodes without a given rank: one launcher becomes node 0, the others are numbered as they join."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from ddplaunch.system.network import reserved_port
from ddplaunch.system.network.reserved_port import try_listen
from tests.conftest import (
    clean_environment,
    ddplaunch_command,
    free_port,
    write_program,
)
from tests.scaled_timeouts import scaled_timeout
from tests.tools.virtual_hosts.fixture import network as network

REDUCES = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "node", os.environ["GROUP_RANK"], "sum", total.item())
dist.destroy_process_group()
"""

PRINTS_RANK = """
import os
print("rank", os.environ["RANK"], "node", os.environ["NODE_RANK"], "id", os.environ["TORCHELASTIC_RUN_ID"])
"""


def c10d(nnodes: str, endpoint: str, *more: str) -> list[str]:
    return ["run", "--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *more]


def test_one_of_several_launchers_claims_the_port():
    port = free_port()
    sockets = [try_listen(port) for _ in range(5)]
    held = [each for each in sockets if each is not None]
    assert len(held) == 1
    socket.create_connection(("127.0.0.1", port)).close()
    held[0].close()


def test_a_port_that_is_in_use_for_a_moment_is_claimed(monkeypatch):
    port = free_port()
    other = socket.create_server(("", port))
    monkeypatch.setattr(reserved_port.time, "sleep", lambda seconds: other.close())
    claimed = try_listen(port)
    assert claimed is not None
    claimed.close()


@pytest.mark.ci
@pytest.mark.smoke
def test_nodes_without_ranks_train_together(start_ddplaunch, tmp_path):
    """Nodes of different size, which start with the variables that Kubeflow gives an elastic PyTorchJob."""
    write_program(tmp_path, "train.py", REDUCES)
    environ = {"PET_NNODES": "1:2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}"}
    jobs = [start_ddplaunch("run", "train.py", env={**environ, "PET_NPROC_PER_NODE": count}) for count in "21"]
    assert [job.wait(90) for job in jobs] == [0, 0], jobs[0].stderr() + jobs[1].stderr()
    lines = sorted(line for job in jobs for line in job.stdout().splitlines())
    assert [line.partition(" node")[0] for line in lines] == [f"[{rank}] rank {rank} of 3" for rank in range(3)]
    assert all(line.endswith("sum 6") for line in lines)
    for job in jobs:
        assert ": PET_NNODES, PET_NPROC_PER_NODE, PET_RDZV_BACKEND" in job.stderr()


def test_no_launcher_is_node_0_where_the_address_is_elsewhere(start_ddplaunch, tmp_path):
    write_program(tmp_path, "train.py", PRINTS_RANK)
    job = start_ddplaunch(*c10d("2", "192.0.2.1:29500", "--rdzv-conf", "join_timeout=1"), "--start", "exec", "train.py")
    assert job.wait() == 69
    assert "1 s (--join-timeout): 192.0.2.1:29501" in job.stderr()
    assert "is the same command running there, and" in job.stderr()


@pytest.mark.smoke
def test_the_dry_run_shows_that_nodes_are_numbered_as_they_join(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    done = run_in_fork("run", "--dry-run", *c10d("2", "n0:4000")[1:], "--nproc-per-node", "2", "train.py")
    assert "node rank: as the nodes join (--node-rank auto)" in done.stdout
    assert (
        "node 1: ddplaunch run --nnodes 2 --node-rank auto --master-addr n0 --master-port 4000 --nproc 2 train.py"
        in done.stdout
    )
    alone = run_in_fork("run", "--dry-run", "--node-rank", "auto", "train.py")
    assert alone.returncode == 0, alone.stderr


@pytest.mark.slow
@pytest.mark.ci
def test_the_host_of_the_endpoint_is_node_0(network, tmp_path: Path):
    """Three virtual hosts, one command; the others start before it."""
    write_program(tmp_path, "train.py", REDUCES)
    hosts = network(3).hosts
    words = ddplaunch_command(*c10d("3", "n2:29400", "--nproc-per-node", "1"), "train.py")
    started = {}
    for index in (0, 1, 2):
        started[index] = hosts[index].start(
            words, cwd=tmp_path, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    output = {index: process.communicate(timeout=scaled_timeout(100))[0] for index, process in started.items()}
    assert [process.returncode for process in started.values()] == [0, 0, 0], output
    assert "[0] rank 0 of 3 node 0 sum 6" in output[2]
    assert sorted(line[:3] for index in (0, 1) for line in output[index].splitlines() if " sum 6" in line) == [
        "[1]",
        "[2]",
    ]
