"""Tests of jobs over SSH with jump hosts, shared connections, users, and IPv6 addresses."""

import os
import signal
import subprocess

import pytest

from tests.conftest import wait_until, write_program
from tests.features.ssh.job import Job
from tests.features.ssh.test_run import QUICK, SHOWS, SLEEPS
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import LIGHT

pytestmark = [pytest.mark.ci, pytest.mark.slow]


def test_users_and_addresses_of_ipv6(sshd, tmp_path):
    write_program(tmp_path, "train.py", SHOWS)
    servers = sshd(3)
    servers.config.write_text(servers.config.read_text().replace("User root", "User nobody"))
    write_program(tmp_path, "hosts", "root@[fd77::11] slots=2\nroot@n2:1\n")
    run = Job(servers, tmp_path, "--hostfile", "hosts", "train.py")
    assert run.wait() == 0, run.stderr()
    assert sorted(run.stdout().splitlines()) == [
        "[0] sum 3 on n1 local 0",
        "[1] sum 3 on n1 local 1",
        "[2] sum 3 on n2 local 0",
    ]
    run.assert_nothing_left()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_hosts_behind_a_jump_host(sshd, tmp_path, how):
    """A job starts on hosts that are reached only through n1."""
    write_program(tmp_path, "train.py", SLEEPS)
    servers = sshd(4)
    ours, _, *behind = servers.network.hosts
    for host in behind:
        host.drop(ours)
    servers.config.write_text(servers.config.read_text() + "Host n2 n3\n  ProxyJump n1\n")
    run = Job(servers, tmp_path, "--hosts", "n2:1,n3:1", *QUICK, "train.py")
    run.wait_for("up", 2)
    run.process.send_signal(how)
    assert run.wait(30) in (130, -how), run.stderr()
    run.assert_nothing_left()


@pytest.fixture
def multiplexed(sshd, tmp_path):
    """Servers whose client is to share connections, as many users have it, and to keep them open."""
    servers = sshd(2)
    options = f"  ControlMaster auto\n  ControlPath {tmp_path}/cm-%h\n  ControlPersist 600\n"
    servers.config.write_text(servers.config.read_text() + options)
    return servers


def logins(servers) -> int:
    """How many logins n1 has had."""
    return servers.log(servers.network.hosts[1]).read_text().count("Accepted publickey")


def log_in(servers) -> None:
    """As the user does, from n0 to n1."""
    quiet = {name: subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")}
    assert servers.start(servers.network.hosts[0], ["ssh", "n1", "true"], **quiet).wait(scaled_timeout(30)) == 0


def test_no_master_of_connections_is_left(multiplexed, tmp_path):
    write_program(tmp_path, "train.py", "")
    run = Job(multiplexed, tmp_path, "--hosts", "n1:1", "train.py")
    assert run.wait() == 0, run.stderr()
    assert not list(tmp_path.glob("cm-*"))
    run.assert_nothing_left()


@pytest.mark.parametrize("how", ["ends", "SIGINT", "SIGKILL", "ssh killed"])
def test_a_master_of_the_user_s_is_used_and_stays(multiplexed, tmp_path, how):
    write_program(tmp_path, "train.py", "print('up', flush=True)\n" if how == "ends" else SLEEPS)
    here, there = multiplexed.network.hosts
    log_in(multiplexed)
    before = logins(multiplexed)
    (master,) = here.find("cm-n1")
    run = Job(multiplexed, tmp_path, "--hosts", "n1:1", *QUICK, "train.py")
    run.wait_for("up")
    if how == "ssh killed":
        for pid in here.find("features.ssh.remote_launcher"):
            os.kill(pid, signal.SIGKILL)
    elif how != "ends":
        run.process.send_signal(signal.Signals[how])
    codes = {"ends": 0, "SIGINT": 130, "SIGKILL": -9, "ssh killed": 69}
    assert run.wait(30) == codes[how], run.stderr()
    run.assert_nothing_left([there])
    wait_until(lambda: here.find("ssh|ddplaunch run") == sorted([master, *here.find("sshd")]), "the end of our side")
    assert logins(multiplexed) == before == 1
    log_in(multiplexed)
    assert logins(multiplexed) == before


def test_a_host_that_falls_silent_behind_a_master(multiplexed, tmp_path):
    """A host that falls silent is lost after the time that the user has set for the master connection."""
    alive = "  ServerAliveInterval 1\n  ServerAliveCountMax 2\n"
    multiplexed.config.write_text(multiplexed.config.read_text() + alive)
    write_program(tmp_path, "train.py", SLEEPS)
    _, there = multiplexed.network.hosts
    log_in(multiplexed)
    run = Job(multiplexed, tmp_path, "--hosts", "n1:1", *QUICK, "train.py")
    run.wait_for("up")
    there.cable.unplug()
    assert run.wait(60) == 69, run.stderr()
    assert "n1 was lost" in run.stderr()
    run.assert_nothing_left([there], timeout=15)


FOR_A_SHELL = """
Host *
  StdinNull yes
  ForkAfterAuthentication yes
  SessionType none
  RequestTTY force
  RemoteCommand tmux attach
  LocalForward 8888 localhost:8888
  ExitOnForwardFailure yes
  PermitLocalCommand yes
  LocalCommand echo connected to %h
  ForwardX11 yes
  LogLevel QUIET
"""


def test_settings_made_for_a_shell(sshd, tmp_path):
    write_program(tmp_path, "train.py", "print('up')\n")
    servers = sshd(3)
    servers.config.write_text(FOR_A_SHELL + servers.config.read_text())
    run = Job(servers, tmp_path, "--hosts", "n1:1,n2:1", *LIGHT, "train.py")
    assert run.wait() == 0, run.stderr()
    assert sorted(run.stdout().splitlines()) == ["[0] up", "[1] up"]
    servers.forget_key(servers.network.hosts[1])
    run = Job(servers, tmp_path, "--hosts", "n1:1", *LIGHT, "train.py")
    assert run.wait() == 69
    assert run.stderr().splitlines()[1] == (
        "  n1  the host key of n1 has changed: if the machine is new, `ssh-keygen -R n1`"
    )
    run.assert_nothing_left()


def test_many_hosts_behind_a_jump_host_that_lets_few_in_at_once(sshd, tmp_path):
    write_program(tmp_path, "train.py", "")
    servers = sshd(14)
    ours, jump, *behind = servers.network.hosts
    for host in behind:
        host.drop(ours)
    servers.config.write_text(servers.config.read_text() + "Host n* !n1\n  ProxyJump n1\n")
    settings = servers.folder / "sshd-n1"
    settings.write_text(f"{settings.read_text()}\nMaxStartups 3:100:3\n")
    for pid in jump.find("sshd"):
        os.kill(pid, signal.SIGHUP)
    wait_until(lambda: servers.log(jump).read_text().count("Server listening") >= 4, "the new settings")
    run = Job(servers, tmp_path, "--hosts", "n[2-13]:1", *LIGHT, "train.py")
    assert run.wait() == 0, run.stderr()
    run.assert_nothing_left()
