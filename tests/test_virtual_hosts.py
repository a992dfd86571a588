"""Tests that virtual hosts leave nothing behind. Their faults are tested by the tests that use them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import is_alive, wait_until
from tests.scaled_timeouts import scaled_timeout
from tests.tools.virtual_hosts.host import Host

pytestmark = pytest.mark.ci


def init_of(host: Host) -> int:
    """The pid of its init."""
    assert host._init is not None
    return host._init.pid


def leftovers() -> tuple[list[str], str]:
    """List interfaces and named namespaces, which could be left."""
    return (
        sorted(os.listdir("/sys/class/net")),
        subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout,
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
        one.cable.delay(1)
        pids += [one.cable._relay.pid]
        other.drop()
        third.power_off()
    net.close()
    assert [pid for pid in pids if is_alive(pid)] == []
    assert leftovers() == before
    assert len(os.listdir("/proc/self/fd")) == len(files)


def test_nothing_is_left_when_the_test_process_is_killed(network):
    network(1)  # skips if the machine cannot have any
    program = """if True:
        import os, signal
        from tests.tools.virtual_hosts.network import Network
        one, other = Network(2).hosts
        pids = [host._init.pid for host in (one, other)]
        pids += [host.start(["sleep", "1000"], start_new_session=True).pid for host in (one, other)]
        one.freeze()
        one.cable.delay(1)
        pids += [one.cable._relay.pid]
        print(*pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    root = Path(__file__).parents[1]
    done = subprocess.Popen([sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    pids = [int(word) for word in done.stdout.readline().split()]
    assert done.wait() == -signal.SIGKILL
    assert len(pids) >= 4
    began = time.monotonic()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the end of the hosts", timeout=10)
    assert time.monotonic() - began < scaled_timeout(5)
