"""Tests of the virtual hosts themselves: connections, faults, and that nothing is left."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import is_alive, wait_until
from tests.scaled_timeouts import scaled_timeout
from tests.virtual_hosts.echo_connection import EchoConnection, echo
from tests.virtual_hosts.host import Host
from tests.virtual_hosts.namespaces import HostError
from tests.virtual_hosts.network import Network

pytestmark = pytest.mark.ci

Make = Callable[..., Network]


def test_hosts_reach_each_other_by_address_and_name(network):
    hosts = network(3).hosts
    for host in hosts:
        echo(host)
    for address in ("10.77.0.12", "fd77::12", "n2", "localhost"):
        assert EchoConnection(hosts[2 if address == "localhost" else 0], address).ask() == "answer"
    assert EchoConnection(hosts[2], "n0").ask() == "answer"


def test_a_host_has_its_own_name_devices_and_memory(network):
    one, other = network(2).hosts
    names = [host.run("cat", "/proc/sys/kernel/hostname").strip() for host in (one, other)]
    assert names == [one.name, other.name] == ["n0", "n1"]
    assert sorted(one.run("ls", "/sys/class/net").split()) == ["eth0", "lo"]
    one.run("touch", "/dev/shm/mine")
    assert "mine" in one.run("ls", "/dev/shm")
    assert "mine" not in other.run("ls", "/dev/shm")
    assert "mine" not in os.listdir("/dev/shm")
    assert one.run("sh", "-c", "ls -d /proc/[0-9]*").split()[0] == "/proc/1"


def test_debian_hosts(network):
    one, _ = network(2, debian_hosts=True).hosts
    lookup = "import socket; print(socket.gethostbyname('n0'), socket.gethostbyname('n1'))"
    assert one.run(sys.executable, "-IS", "-c", lookup).split() == ["127.0.1.1", "10.77.0.11"]


def test_without_ipv6(network):
    one, other = network(2, ipv6=False).hosts
    assert (one.address6, one.run("cat", "/proc/net/if_inet6")) == ("", "")
    assert "::" not in other.run("cat", "/etc/hosts")


@pytest.mark.parametrize(("dns", "least", "most"), [("files", 0, 0.9), ("dead", 1, 4)])
def test_dead_dns_takes_its_time(network, dns, least, most):
    (host,) = network(1, dns=dns).hosts
    lookup = """if True:
        import socket, time
        began = time.monotonic()
        try:
            socket.gethostbyaddr("10.77.0.99")
        except OSError:
            print(time.monotonic() - began)
    """
    short = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"}  # the default is 5 s, twice
    assert least <= float(host.run(sys.executable, "-IS", "-c", lookup, env=short)) < scaled_timeout(most)


def test_two_networks_have_nothing_to_do_with_each_other(network):
    here, there = network(2).hosts, network(2).hosts
    echo(here[1])
    assert EchoConnection(here[0], "n1").ask() == "answer"
    assert EchoConnection(there[0], "n1").connected == "ConnectionRefusedError"


def test_a_started_process_is_our_own(network, tmp_path):
    (host,) = network(1).hosts
    assert host.start(["sh", "-c", "exit 7"]).wait() == 7
    sleep = host.start(["sleep", "1000"])
    assert host.find("^sleep 1000$") == host.processes() == [sleep.pid]
    sleep.terminate()
    assert sleep.wait() == -signal.SIGTERM
    assert host.run("pwd").strip() == os.getcwd()
    assert host.run("pwd", cwd=tmp_path).strip() == str(tmp_path)
    with pytest.raises(HostError, match="exit status 1"):
        host.run("false")
    assert host.run("sh", "-c", "echo so; exit 1", check=False) == "so\n"
    with pytest.raises(FileNotFoundError):
        host.start(["/proc/no/program"])


def test_ctrl_c_is_for_all_of_the_terminal(network):
    (host,) = network(1).hosts
    ours, theirs = os.openpty()
    # The leader of a session gets the terminal that it opens.
    command = 'exec <>"$0"; trap "wait; exit 5" INT; (trap "exit 3" INT; sleep 1000 & echo ready; wait) & wait; exit 4'
    words = ["bash", "-c", command, os.ttyname(theirs)]
    process = host.start(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.write(ours, b"\x03")
    assert process.wait(scaled_timeout(10)) == 5
    os.close(ours)
    os.close(theirs)


def test_orphans_are_reaped_by_init(network):
    (host,) = network(1).hosts
    host.run("sh", "-c", "sleep 0.1 >/dev/null 2>&1 &")
    wait_until(lambda: host.run("sh", "-c", "grep -l sleep /proc/[0-9]*/comm; true") == "", "the orphan")


def init_of(host: Host) -> int:
    """The pid of its init."""
    assert host._init is not None
    return host._init.pid


def leftovers() -> tuple[list[str], str, list[str]]:
    """What could be left: interfaces, named namespaces, control groups."""
    return (
        sorted(os.listdir("/sys/class/net")),
        subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout,
        [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/hosts-{os.getpid()}-*")],
    )


def test_nothing_is_left_after_close(network):
    before, files = leftovers(), os.listdir("/proc/self/fd")
    with network(3, second=True) as net:
        one, other, third = net.hosts
        pids = [init_of(host) for host in net.hosts]
        pids += [host.start(["sleep", "1000"], start_new_session=True).pid for host in net.hosts]
        one.run("sh", "-c", "setsid sleep 2000 >/dev/null 2>&1 &")
        pids += one.find("sleep 2000")
        one.freeze()
        one.delay(1)
        pids += [relay.pid] if (relay := one._cables[0]._relay) else []
        other.drop()
        third.power_off()
    net.close()
    assert [pid for pid in pids if is_alive(pid)] == []
    assert leftovers() == before
    assert len(os.listdir("/proc/self/fd")) == len(files)


def test_nothing_is_left_when_half_of_it_fails(network, monkeypatch):
    before, files, started = leftovers(), os.listdir("/proc/self/fd"), []
    finish = Host.finish_boot

    def fail(host: Host) -> None:
        started.append(init_of(host))
        finish(host)
        if host.number == 1:
            raise HostError("as if")

    monkeypatch.setattr(Host, "finish_boot", fail)
    with pytest.raises(HostError, match="as if"):
        network(3)
    assert [pid for pid in started if is_alive(pid)] == []
    assert leftovers() == before
    assert len(os.listdir("/proc/self/fd")) == len(files)


def test_nothing_is_left_when_the_test_process_is_killed(network):
    network(1)  # skips where there can be none
    program = """if True:
        import os, signal
        from tests.virtual_hosts.network import Network
        one, other = Network(2).hosts
        pids = [host._init.pid for host in (one, other)]
        pids += [host.start(["sleep", "1000"], start_new_session=True).pid for host in (one, other)]
        one.freeze()
        one.delay(1)
        pids += [one._cables[0]._relay.pid] if one._cables[0]._relay else []
        print(*pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    root = Path(__file__).parents[2]
    done = subprocess.Popen([sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    pids = [int(word) for word in done.stdout.readline().split()]
    assert done.wait() == -signal.SIGKILL
    assert len(pids) >= 4
    began = time.monotonic()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the end of the hosts", timeout=10)
    assert time.monotonic() - began < scaled_timeout(5)
    pattern = re.compile(rf"hosts-{done.pid}-")
    left = [path for path, _, _ in os.walk("/sys/fs/cgroup") if pattern.search(path)]
    assert left == []
