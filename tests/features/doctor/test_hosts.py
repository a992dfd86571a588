"""Tests of ``ddplaunch doctor --hosts``: faults between virtual hosts, each found and named."""

import os
import re
import sys
from pathlib import Path

import pytest

import ddplaunch
from ddplaunch.system.devices.cgroups import list_cgroup_dirs
from tests.conftest import wait_until, write_program
from tests.features.doctor.doctor_command import DoctorCommand
from tests.features.doctor.findings import CPU_LIMIT, ITSELF, LARGE_LOST, NO_LOOPBACK, TOO_FAR

pytestmark = [pytest.mark.ci, pytest.mark.slow]


@pytest.fixture
def doctor(sshd, tmp_path):
    """Examine ``count`` hosts after ``spoil(hosts)``; return the exit code, the JSON output, and the findings."""

    def look(count, spoil=lambda hosts: None, *words, **network):
        servers = sshd(count, **network)
        hosts = servers.network.hosts
        for host in hosts:
            host.run("mount", "--bind", os.devnull, Path("~/.bashrc").expanduser())  # what logins of this machine do
        spoil(hosts)
        words = ("--hosts", f"n[0-{count - 1}]", *words)
        return DoctorCommand(hosts[0], tmp_path, *words, env=servers.environment, far=hosts[1:]).read_result()

    return look


TAKES = """
import socket, time
taken = socket.create_server(("", 29501))
time.sleep(600)
"""


def test_faults_of_six_hosts_are_all_named(doctor, tmp_path):
    """Each fault of six hosts is named: ports, /dev/shm, a firewall, torch, lost packets, no ddplaunch, no power."""
    import torch

    version = write_program(tmp_path, "version.py", '__version__ = "1.0.0"\ncuda = hip = xpu = git_version = None\n')

    def spoil(hosts):
        hosts[0].start([sys.executable, "-c", TAKES])
        hosts[1].drop_port(29500)
        hosts[1].drop_large(hosts[2])
        hosts[2].run("mount", "-t", "tmpfs", "-o", "size=48m", "none", "/dev/shm")
        hosts[2].run("mount", "--bind", version, torch.__file__.replace("__init__.py", "version.py"))
        hosts[3].drop_loopback()
        hosts[4].run("mount", "-t", "tmpfs", "none", Path(ddplaunch.__file__).parent)
        hosts[5].power_off()
        wait_until(lambda: "29501" in hosts[0].run("ss", "-ltn"), "the listener")

    code, found, result = doctor(6, spoil)
    assert code == 1
    assert {
        "n1: port 29500 is blocked in both directions",
        f"n1 to n2: {LARGE_LOST}",
        "n0: cannot listen on port 29501: Address already in use",
        f"n2: torch differs: {torch.__version__} on n0, n1 and n3; 1.0.0 on n2",
        "n3: " + NO_LOOPBACK,
    } < set(result)
    for beginning in (
        "n2: /dev/shm has 48 MiB free of 48 MiB",
        "n4: did not respond: ddplaunch is not installed for the Python on that host",
        "n5: did not respond: ssh: connect to host n5 port 22",
    ):
        assert [each for each in result if each.startswith(beginning)], result
    assert len(result) == 8, result
    assert [(each["source"], each["target"]) for each in found["flows"] if not each["large"]] == [(1, 2)]
    measured = sorted(tuple(each["nodes"]) for each in found["speeds"])
    assert measured == [(0,), (0, 1), (0, 2), (1,), (2,)], "what could be measured was"


def test_each_of_three_causes_is_one_finding(doctor, tmp_path):
    """Lost packets, a wrong address of node 0 and a blocked port, each on another host, are three findings."""

    def spoil(hosts):
        names = hosts[2].run("cat", "/etc/hosts").replace("10.77.0.10 n0", "127.0.0.1 n0").replace("fd77::10 n0", "")
        hosts[2].run("mount", "--bind", write_program(tmp_path, "hosts", names), "/etc/hosts")
        hosts[1].loss(10)
        hosts[3].drop_port(29500)

    code, _, (lost, *others) = doctor(4, spoil)
    assert code == 1
    (percent,) = re.fullmatch(r"n1: packets are lost: (\d+(?:\.\d)?) % \(\d+ of \d+\)", lost).groups()
    assert 5 < float(percent) < 20
    assert others == [
        f"n2: {ITSELF} (127.0.0.1)",
        "n3: port 29500 is blocked in both directions",
    ]


def test_a_link_that_is_slow_and_far(doctor):
    """One host has both faults: on a busy machine, the relay that delays packets limits the throughput too."""

    def spoil(hosts):
        hosts[1].cable.delay(20)
        hosts[1].cable.narrow("10mbit")

    code, found, result = doctor(3, spoil)
    assert code == 1
    far, slow = result
    assert re.fullmatch(rf"n1: round-trip time is 4\d(\.\d)? ms; {TOO_FAR}", far)
    assert re.fullmatch(r"n1: throughput is (9|1[0-2])(\.\d+)? Mbit/s; the interface reports 10000 Mbit/s", slow)
    assert {tuple(speed["nodes"]) for speed in found["speeds"]} == {(0,), (1,), (2,), (0, 2)}


def test_debian_hosts_of_which_one_has_little_time(doctor, tmp_path):
    """The CPU quota of one host is the only finding on hosts whose own names resolve to 127.0.1.1."""
    group = write_program(tmp_path, "group/cpu.max", "25000 100000\n").parent

    def limit(hosts):
        hosts[1].run("mount", "--bind", group, next(filter(os.path.isdir, list_cgroup_dirs("cpu"))))

    code, found, result = doctor(2, limit, debian_hosts=True, ipv6=False)
    assert (code, result) == (0, [f"n1: {CPU_LIMIT} 0.25 of {os.cpu_count()} CPUs"])
    assert [each["severity"] for each in found["findings"] if "control group" in each["text"]] == ["warning"]
    links = [node["facts"]["link"] for node in found["nodes"]]
    assert [(link["interface"], link["mtu"]) for link in links] == [("eth0", 1500)] * 2
    assert [0, 1] in [speed["nodes"] for speed in found["speeds"]]


def test_two_more_networks_of_which_one_is_cut_at_one_host(doctor, tmp_path):
    little = write_program(tmp_path, "meminfo", "MemTotal: 8000000 kB\nMemAvailable: 1200000 kB\n")

    def spoil(hosts):
        hosts[0].run("mount", "--bind", little, "/proc/meminfo")  # so that no tensor is large
        for number, host in enumerate(hosts):
            host.run("ip", "address", "add", f"10.79.0.{10 + number}/24", "dev", "eth1")
        hosts[2].run("ip", "address", "del", "10.78.0.12/24", "dev", "eth1")
        hosts[2].run("nft", "add table ip cut")
        hosts[2].run("nft", "add chain ip cut in { type filter hook input priority 0 ; }")
        hosts[2].run("nft", "add rule ip cut in iifname eth1 drop")

    code, found, result = doctor(3, spoil, "--thorough", second=True)
    assert code == 0
    assert sorted(result) == [
        "n0 and n1 to n2: a connection over 10.79.0.0/24 (eth1) gets no answer",
        "n2 to n0 and n1: a connection over 10.79.0.0/24 (eth1) gets no answer",
    ]
    collectives = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    assert [(each["name"], each["nodes"], each["error"]) for each in found["together"]] == [
        *((name, [0, 1, 2], None) for name in collectives),
        ("all_reduce over 10.78.0.0/24", [0, 1], None),
    ]
    sizes = found["sizes"][: max(len(each["seconds"]) for each in found["together"])]
    assert sizes[-1] <= 1_200_000_000 / 16
