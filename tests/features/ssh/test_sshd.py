"""Tests that the sshd of a virtual host behaves like one on a real machine."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.features.ssh.sshd import Sshd
from tests.scaled_timeouts import scaled_timeout

pytestmark = [pytest.mark.ci, pytest.mark.slow]

RUN_SSHD = Path("/run/sshd")


def ask(servers: Sshd, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``ssh WORDS`` on n0 to its end."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = servers.start(servers.network.hosts[0], ["ssh", "-o", "BatchMode=yes", *words], text=True, **pipes)
    out, err = process.communicate(timeout=scaled_timeout(30))
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def test_environment_and_folder_are_those_of_a_login(sshd):
    there_before = RUN_SSHD.exists()
    servers = sshd(2)
    assert RUN_SSHD.exists() == there_before, "what the daemons need is in the hosts only"
    done = ask(servers, "n1", "pwd; env")
    home, *variables = done.stdout.splitlines()
    assert home == str(servers.home)
    names = {line.partition("=")[0] for line in variables}
    assert "SSH_CONNECTION" in names
    assert not names & {"PYTHONPATH", "VIRTUAL_ENV", "PYTEST_CURRENT_TEST"}


def test_a_host_without_a_daemon_refuses(sshd):
    servers = sshd(2)
    host = servers.network.hosts[1]
    host.kill_all()
    host.boot()
    done = ask(servers, "-o", "ConnectTimeout=1", "n1", "true")
    assert done.returncode == 255
    assert "Connection refused" in done.stderr


def test_daemons_and_sessions_end_with_their_hosts(sshd):
    servers = sshd(2)
    host = servers.network.hosts[1]
    session = servers.start(servers.network.hosts[0], ["ssh", "n1", "sleep 1000"], stdin=subprocess.PIPE)
    wait_until(lambda: host.find("^sleep 1000$"), "the session")
    servers.network.close()
    assert not host.processes()
    assert session.wait(scaled_timeout(10))
