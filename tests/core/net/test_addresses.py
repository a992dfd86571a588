"""Tests of node 0's address and interface on several hosts, each with a network of its own."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.conftest import clean_environment, ddplaunch_command, write_program
from tests.scaled_timeouts import scaled_timeout
from tests.tools.virtual_hosts.host import finish

pytestmark = [pytest.mark.ci, pytest.mark.slow]

SHOWS = """
import os

print(*map(os.environ.get, ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RES_OPTIONS")))
"""
"""Enough where another test has torch reduce by way of the same address or interface."""

REDUCES = f"""
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
dist.destroy_process_group()
{SHOWS}
"""


class Hosts:
    """The same command on each host of a network."""

    def __init__(self, folder, network) -> None:
        self.folder, self.network = folder, network
        write_program(folder, "reduces.py", REDUCES)
        write_program(folder, "shows.py", SHOWS)

    def start(self, number: int, address: str, *options: str, target: str = "reduces.py", env=None):
        words = ("run", "--nnodes", str(len(self.network.hosts)), "--node-rank", str(number), "--nproc", "1",
                 "--master-addr", address, "--master-port", "29500", *options, target)  # fmt: skip
        return self.network.hosts[number].start(
            ddplaunch_command(*words), cwd=self.folder, env=clean_environment(env), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, address: str, *options: str, **how) -> tuple[list[int], list[str], list[str]]:
        """Exit codes, stdout and stderr, by host."""
        processes = [self.start(number, address, *options, **how) for number in range(len(self.network.hosts))]
        results = [process.communicate(timeout=scaled_timeout(100)) for process in processes]
        return [process.returncode for process in processes], [out for out, _ in results], [err for _, err in results]

    def reduce(self, address: str, *options: str, **how) -> list[list[str]]:
        """The words that each rank printed."""
        codes, out, err = self.run(address, *options, **how)
        assert set(codes) == {0}, err
        assert not any(host.processes() for host in self.network.hosts)
        return [re.sub(r"^\[\d+\] ", "", text).split() for text in out]

    def show(self, address: str, *options: str, **how) -> list[list[str]]:
        """As ``reduce``, without doing so."""
        return self.reduce(address, *options, target="shows.py", **how)


@pytest.fixture
def hosts(network, tmp_path):
    return lambda count=2, **options: Hosts(tmp_path, network(count, **options))


@pytest.mark.parametrize(
    ("made", "how", "address", "options", "printed"),
    [
        ({}, "show", "10.77.0.10", (), "10.77.0.10 eth0 None None"),
        ({"debian_hosts": True}, "reduce", "10.77.0.10", (), "10.77.0.10 eth0 None None"),  # its own name is 127.0.1.1
        ({}, "reduce", "fd77::10", (), "fd77::10 eth0 None None"),
        ({}, "show", "n0", (), "fd77::10 eth0 None None"),
        ({"second": True}, "show", "10.78.0.10", (), "10.78.0.10 eth1 None None"),
        ({"second": True}, "reduce", "10.78.0.10", ("--interface", "eth1"), "10.78.0.10 eth1 =eth1 None"),
    ],
)
def test_ranks_meet_at_the_address_that_peers_reach(hosts, made, how, address, options, printed):
    assert getattr(hosts(**made), how)(address, *options) == [printed.split()] * 2


def test_interfaces_that_the_user_has_set_stay(hosts):
    found = hosts(second=True).reduce("10.77.0.10", env={"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "ib7"})
    assert found == [["10.77.0.10", "eth1", "ib7", "None"]] * 2


def test_an_address_of_another_node_is_refused(hosts):
    process = hosts(3).start(0, "10.77.0.11")
    _, err = finish(process, 2)
    assert (
        "--master-addr 10.77.0.11 is not an address of this machine, which is node 0: it has 10.77.0.10 (eth0)" in err
    )


def test_a_name_server_that_does_not_answer(hosts):
    """torch looks up every peer's name: 10 s without an answer; ranks wait 1 s."""
    codes, out, err = hosts(dns="dead").run("10.77.0.10")
    assert codes == [0, 0], err
    assert all("10.77.0.10 eth0 None timeout:1 attempts:1\n" in text for text in out)
    assert all("the name server does not answer" in text for text in err)


def test_a_name_that_no_server_resolves_is_waited_for(hosts):
    """It may answer later; Ctrl-C ends the wait."""
    job = hosts(dns="dead")
    process = job.start(1, "elsewhere.example", "--join-timeout", "2")
    _, err = finish(process, 69)
    assert "2 s (--join-timeout)" in err


@pytest.mark.parametrize(
    ("fault", "seconds", "expected"),
    [
        ("drop", "4.5", "does a firewall block it?"),  # shown after 4 s
        ("power_off", "4.5", "does a firewall block it|no route"),
        ("reject", "1", "connection refused"),
    ],
)
def test_node_zero_does_not_answer(hosts, fault, seconds, expected):
    job = hosts()
    getattr(job.network.hosts[0], fault)()
    process = job.start(1, "10.77.0.10", "--join-timeout", seconds)
    _, err = finish(process, 69)
    assert re.search(expected, err), err
    assert not job.network.hosts[1].processes()
