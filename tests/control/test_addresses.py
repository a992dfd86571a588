"""Several hosts, each with its own network: which address node 0 has for the others, and through which interface."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.conftest import clean_environment, command, write

REDUCES = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RES_OPTIONS"
print("sum", total.item(), *(os.environ.get(name) for name in names))
dist.destroy_process_group()
"""


class Hosts:
    """The same command on each host of a network."""

    def __init__(self, folder, network) -> None:
        self.folder, self.network = folder, network
        write(folder, "train.py", REDUCES)

    def start(self, number: int, address: str, *options: str, env=None, target: str = "train.py"):
        words = ("run", "--nnodes", str(len(self.network.hosts)), "--node-rank", str(number), "--nproc", "1",
                 "--master-addr", address, "--master-port", "29500", *options, target)  # fmt: skip
        return self.network.hosts[number].start(
            command(*words), cwd=self.folder, env=clean_environment(env), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, address: str, *options: str, env=None) -> tuple[list[int], list[str], list[str]]:
        """Codes, what was printed, and what was said, by host."""
        processes = [self.start(number, address, *options, env=env) for number in range(len(self.network.hosts))]
        told = [process.communicate(timeout=100) for process in processes]
        return [process.returncode for process in processes], [out for out, _ in told], [err for _, err in told]

    def reduce(self, address: str, *options: str, env=None) -> list[list[str]]:
        """The words that each rank printed."""
        codes, out, err = self.run(address, *options, env=env)
        assert set(codes) == {0}, err
        assert not any(host.processes() for host in self.network.hosts)
        words = [re.sub(r"^\[\d+\] ", "", text).split() for text in out]
        assert all(each[:2] == ["sum", str(float(len(codes)))] for each in words)
        return [each[2:] for each in words]


@pytest.fixture
def hosts(network, tmp_path):
    return lambda count=2, **options: Hosts(tmp_path, network(count, **options))


@pytest.mark.parametrize("debian", [False, True])
def test_an_ipv4_address(hosts, debian):
    """Also where the host's own name resolves to 127.0.1.1, as Debian's installer has it."""
    assert hosts(debian_hosts=debian).reduce("10.77.0.10") == [["10.77.0.10", "eth0", "None", "None"]] * 2


@pytest.mark.parametrize("address", ["fd77::10", "n0"])
def test_an_ipv6_address_and_a_name(hosts, address):
    assert hosts().reduce(address) == [["fd77::10", "eth0", "None", "None"]] * 2


def test_the_published_address_is_the_one_that_peers_reach(hosts):
    assert hosts(second=True).reduce("10.78.0.10") == [["10.78.0.10", "eth1", "None", "None"]] * 2


def test_an_interface_can_be_chosen(hosts):
    job = hosts(second=True)
    assert job.reduce("10.78.0.10", "--interface", "eth1") == [["10.78.0.10", "eth1", "eth1", "None"]] * 2


def test_what_the_user_has_set_stays(hosts):
    found = hosts(second=True).reduce("10.77.0.10", env={"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "ib7"})
    assert found == [["10.77.0.10", "eth1", "ib7", "None"]] * 2


def test_an_address_of_another_node_is_refused(hosts):
    process = hosts(3).start(0, "10.77.0.11")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert (
        "--master-addr 10.77.0.11 is not an address of this machine, which is node 0: it has 10.77.0.10 (eth0)" in err
    )


def test_a_name_server_that_does_not_answer(hosts):
    """torch looks up every peer's name: 10 s where nobody answers; ranks are told to wait 1 s."""
    codes, out, err = hosts(dns="dead").run("10.77.0.10")
    assert codes == [0, 0], err
    assert all("10.77.0.10 eth0 None timeout:1 attempts:1\n" in text for text in out)
    assert all("no name server answers" in text for text in err)


def test_a_name_that_no_server_resolves_is_waited_for(hosts):
    """It may answer later; Ctrl-C ends the wait."""
    job = hosts(dns="dead")
    process = job.start(1, "elsewhere.example", "--join-timeout", "2")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 69
    assert "node 0 was not reached in 2 s (--join-timeout)" in err


@pytest.mark.parametrize("fault", ["drop", "reject", "power_off"])
def test_node_zero_does_not_answer(hosts, fault):
    job = hosts()
    getattr(job.network.hosts[0], fault)()
    process = job.start(1, "10.77.0.10", "--join-timeout", "6")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 69
    said = {"drop": "is a firewall between?", "reject": "connection refused", "power_off": "firewall between|no route"}
    assert re.search(said[fault], err), err
    assert not job.network.hosts[1].processes()
