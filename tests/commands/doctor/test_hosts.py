"""``ddplaunch doctor --hosts``: faults between virtual hosts, each found and named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ddplaunch
from tests.conftest import clean_environment, wait_until, write
from tests.patience import patience

pytestmark = [pytest.mark.ci, pytest.mark.slow]

OF_LOAD = ("processes want to run", "multiplies matrices", "of memory are available", "between them runs at", "TMPDIR")
"""What a busy machine that plays several hosts brings about by itself, and a /dev/shm that is TMPDIR too."""


@pytest.fixture
def doctor(sshd, tmp_path):
    """Look at so many hosts after ``spoil(hosts)``; return the exit code, the answer, and what it found."""

    def look(count, spoil=lambda hosts: None, *words, **network):
        servers = sshd(count, **network)
        hosts = servers.network.hosts
        where = {"PYTHONPATH": str(Path(ddplaunch.__file__).parents[1]), **servers.environment}
        for host in hosts:
            host.run("mount", "--bind", os.devnull, Path("~/.bashrc").expanduser())  # what logins of this machine do
        spoil(hosts)
        process = hosts[0].start(
            [sys.executable, "-m", "ddplaunch", "doctor", "--hosts", f"n[0-{count - 1}]", "--json", *words],
            cwd=tmp_path,
            env=clean_environment({**os.environ, **where}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        out, _ = process.communicate(timeout=patience(100))
        ours = [host for host in hosts if host.alive]
        wait_until(lambda: not any(host.find("commands.doctor") for host in ours), "the end of what it started")
        assert out, process.returncode
        found = json.loads(out)
        said = [f"{each['subject']}: {each['text']}" for each in found["findings"]]
        return process.returncode, found, [each for each in said if not any(word in each for word in OF_LOAD)]

    return look


def test_a_closed_port_a_small_shm_and_a_port_that_is_taken(doctor):
    def spoil(hosts):
        hosts[1].drop_port(29500)
        hosts[2].run("mount", "-t", "tmpfs", "-o", "size=48m", "none", "/dev/shm")
        hosts[0].start([sys.executable, "-c", TAKES])
        wait_until(lambda: "29501" in hosts[0].run("ss", "-ltn"), "the listener")

    code, found, said = doctor(3, spoil)
    assert code == 1
    assert "n0 and n2 to n1: a connection at port 29500 gets no answer" in said
    assert "n1 to n0 and n2: a connection at port 29500 gets no answer" in said
    assert "n0: it cannot listen at port 29501: Address already in use" in said
    assert [each for each in said if each.startswith("n2: /dev/shm has 48 MiB free of 48 MiB")]
    assert len(said) == 4, said
    pairs = [tuple(each["nodes"]) for each in found["speeds"] if len(each["nodes"]) == 2]
    assert sorted(pairs) == [(0, 1), (0, 2), (1, 2)], "what could be measured was"


TAKES = """
import socket, time
taken = socket.create_server(("", 29501))
time.sleep(600)
"""


def test_a_path_that_drops_large_packets_and_a_firewall_on_a_loopback(doctor):
    def spoil(hosts):
        hosts[1].drop_large(hosts[2])
        hosts[3].drop_loopback()

    code, found, said = doctor(4, spoil)
    assert code == 1
    assert sorted(said) == [
        "n1 to n2: a connection works, but packets of full size are lost on the way",
        "n3: a connection to itself (127.0.0.1) gets no answer, so nothing was measured there",
    ]
    assert {each["outcome"] for each in found["ways"]} == {"ok"}
    assert [(each["source"], each["target"]) for each in found["flows"] if not each["large"]] == [(1, 2)]
    assert sorted(speed["nodes"] for speed in found["speeds"]) == [[0], [0, 1], [0, 2], [1], [2]]


def test_a_path_that_loses_packets(doctor):
    code, found, said = doctor(2, lambda hosts: hosts[1].loss(10))
    assert code == 1
    (lost,) = said
    assert re.fullmatch(r"n[01] (and|to) n[01]: packets are lost on the way: \d+(\.\d)? % \(\d+ of \d+\)", lost)
    assert [speed["nodes"] for speed in found["speeds"]] == [[0], [1]], "nor is it waited for in a collective"


def test_a_link_that_is_slow_and_far(doctor):
    def spoil(hosts):
        hosts[2].delay(20)
        hosts[1].narrow("10mbit")

    code, found, said = doctor(3, spoil)
    assert code == 1
    far, slow = said
    assert re.fullmatch(r"n2: a packet takes 4\d(\.\d)? ms there and back; in a machine room under 1 ms", far)
    assert re.fullmatch(r"n1: data flows at (9|10)(\.\d+)? Mbit/s, and the interface claims 10000 Mbit/s", slow)
    assert {tuple(speed["nodes"]) for speed in found["speeds"]} == {(0,), (1,), (2,)}


def test_debian_hosts_of_which_one_has_little_time(doctor):
    """It is named for what its control group allows: between two waits it is as fast as others."""
    code, found, said = doctor(2, lambda hosts: hosts[1].limit(0.25), debian_hosts=True, ipv6=False)
    assert (code, said) == (0, [f"n1: the control group allows the time of 0.25 of {os.cpu_count()} CPUs"])
    assert [each["severity"] for each in found["findings"] if "control group" in each["text"]] == ["warning"]
    links = [node["facts"]["link"] for node in found["nodes"]]
    assert [(link["interface"], link["mtu"]) for link in links] == [("eth0", 1500)] * 2
    assert [0, 1] in [speed["nodes"] for speed in found["speeds"]]


def test_a_slow_host(doctor):
    code, found, said = doctor(3, lambda hosts: hosts[2].slow("20 mbytes/second"))
    assert code == 0
    (slow,) = said
    links = [each["subject"] for each in found["findings"] if "between them runs at" in each["text"]]
    assert not [link for link in links if "n2" in link], "the node is named, not each of its links"
    assert slow.startswith("n2: all_reduce with any other node runs at ")


def test_hosts_that_differ_or_do_not_answer(doctor, tmp_path):
    import torch

    version = write(tmp_path, "version.py", '__version__ = "1.0.0"\ncuda = hip = xpu = git_version = None\n')

    def spoil(hosts):
        hosts[1].run("mount", "--bind", version, torch.__file__.replace("__init__.py", "version.py"))
        hosts[2].run("mount", "-t", "tmpfs", "none", Path(ddplaunch.__file__).parent)
        hosts[3].power_off()

    code, _, said = doctor(4, spoil)
    assert code == 1
    assert f"n1: torch differs: {torch.__version__} on n0; 1.0.0 on n1" in said
    gone = "n2: it did not take part: ddplaunch is not installed for this Python there"
    assert [each for each in said if each.startswith(gone)]
    assert [each for each in said if each.startswith("n3: it did not take part: ssh: connect to host n3 port 22")]
    assert len(said) == 3, said


def test_two_more_networks_of_which_one_is_cut_at_one_host(doctor, tmp_path):
    little = write(tmp_path, "meminfo", "MemTotal: 8000000 kB\nMemAvailable: 1200000 kB\n")

    def spoil(hosts):
        hosts[0].run("mount", "--bind", little, "/proc/meminfo")  # so that no tensor is large
        for number, host in enumerate(hosts):
            host.run("ip", "address", "add", f"10.79.0.{10 + number}/24", "dev", "eth1")
        hosts[2].run("ip", "address", "del", "10.78.0.12/24", "dev", "eth1")
        hosts[2].run("nft", "add table ip cut")
        hosts[2].run("nft", "add chain ip cut in { type filter hook input priority 0 ; }")
        hosts[2].run("nft", "add rule ip cut in iifname eth1 drop")

    code, found, said = doctor(3, spoil, "--thorough", second=True)
    assert code == 0
    assert sorted(said) == [
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
