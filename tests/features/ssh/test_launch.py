"""Tests of ``ddplaunch.launch`` on hosts that are reached over SSH."""

import os
import sys

import pytest

from tests.conftest import clean_environment, write_program
from tests.scaled_timeouts import scaled_timeout

pytestmark = [pytest.mark.ci, pytest.mark.slow]

PROGRAM = """
import os
import socket
import sys

from ddplaunch import RankFailed, launch


def work(factor):
    print("at", socket.gethostname())
    return socket.gethostname(), factor * int(os.environ["RANK"]), os.environ["WORLD_SIZE"]


def fail():
    if os.environ["RANK"] == "1":
        raise ValueError("no luck")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        node = {"nnodes": 2, "node_rank": int(sys.argv[1]), "master_addr": sys.argv[2], "token": "x" * 20}
        print(launch(work, 10, nproc=1, preload="threading", **node))
    else:
        print(launch(work, 10, hosts="n1:1,n0:2", preload="threading"))
        try:
            launch(fail, hosts="n0:1,n1:1", preload="threading")
        except RankFailed as error:
            print(error.rank, error.host, repr(error.__cause__))
"""


def test_ranks_on_two_hosts(sshd, tmp_path):
    """Results and exceptions of ranks on two hosts reach the caller; no file is left in the shared folder."""
    servers = sshd(2)
    folder = tmp_path / "shared"
    folder.mkdir()
    write_program(folder, "program.py", PROGRAM)
    words = [sys.executable, "program.py"]
    program = servers.network.hosts[0].type(words, folder, clean_environment(servers.environment))
    output, error = program.communicate(timeout=scaled_timeout(100))
    lines = output.splitlines()
    assert sorted(lines[:3]) == ["[0] at n1", "[1] at n0", "[2] at n0"], error
    assert lines[3:] == ["[('n1', 0, '3'), ('n0', 10, '3'), ('n0', 20, '3')]", "1 n1 ValueError('no luck')"], error
    assert [name for name in os.listdir(folder) if name.startswith("ddplaunch-")] == []


def test_a_program_on_each_node(network, tmp_path):
    """A program that runs on each node gets the results of the ranks of its own node."""
    hosts = network(2).hosts
    write_program(tmp_path, "program.py", PROGRAM)
    words = [sys.executable, "program.py"]
    programs = [
        host.type([*words, str(number), hosts[0].address], tmp_path, clean_environment())
        for number, host in enumerate(hosts)
    ]
    printed = [program.communicate(timeout=scaled_timeout(100)) for program in programs]
    assert [output.splitlines()[-1:] for output, _ in printed] == [["[('n0', 0, '2')]"], ["[('n1', 10, '2')]"]], printed
