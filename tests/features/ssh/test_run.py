"""Tests of ``ddplaunch run --hosts``: jobs on hosts that are reached over SSH."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ddplaunch
from tests.conftest import wait_until, write_program
from tests.features.ssh.job import LAUNCHER, Job, refusal
from tests.start_modes import LIGHT

pytestmark = [pytest.mark.ci, pytest.mark.slow]

SHOWS = """
import os
import socket
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), "on", socket.gethostname(), "local", os.environ["LOCAL_RANK"], *sys.argv[1:])
dist.destroy_process_group()
"""

WAITS = "while not os.path.exists('go'): time.sleep(0.05)\n"


@pytest.fixture
def job(sshd, tmp_path):
    """Start jobs on ``count`` hosts."""

    def begin(count, *words, servers=None, **options):
        return Job(servers or sshd(count), tmp_path, *words, **options)

    return begin


def test_a_job_on_three_hosts_with_different_counts(job, tmp_path):
    write_program(tmp_path, "train.py", SHOWS)
    run = job(3, "--hosts", "n1:2,n0:1,n2:1", "train.py", "--", "--lr", "0.1 $x")
    assert run.wait() == 0, run.stderr()
    assert not re.search(r"\(00:0[0-4]\)", run.stderr()), "the first seconds of the wait for each other are no news"
    assert sorted(run.stdout().splitlines()) == [
        "[0] sum 4 on n1 local 0 --lr 0.1 $x",
        "[1] sum 4 on n1 local 1 --lr 0.1 $x",
        "[2] sum 4 on n0 local 0 --lr 0.1 $x",
        "[3] sum 4 on n2 local 0 --lr 0.1 $x",
    ]
    run.assert_nothing_left()


FAILS = """
import os
import time

open("up" + os.environ["RANK"], "w").close()
if os.environ["RANK"] == "2":
    while not (os.path.exists("up0") and os.path.exists("up1")):
        time.sleep(0.1)
    raise ValueError("no such class: 11")
time.sleep(600)
"""


def test_a_failed_rank_is_reported_once_with_log_json_too(job, sshd, tmp_path):
    write_program(tmp_path, "train.py", FAILS)
    servers = sshd(2)
    run = job(2, "--hosts", "n0:2,n1:1", *LIGHT, "train.py", servers=servers)
    assert run.wait() == 1
    lines = [line for line in run.stderr().splitlines() if not line.startswith("[") and "waiting for" not in line]
    assert lines == [
        "ddplaunch: rank 2 failed with ValueError: no such class: 11 (exit code 1) (on n1)",
        "  Traceback (most recent call last):",
        f'    File "{tmp_path}/train.py", line 8, in <module>',
        '      raise ValueError("no such class: 11")',
        "  ValueError: no such class: 11",
        "  2 other ranks were stopped",
    ]
    run.assert_nothing_left()
    run = job(2, "--hosts", "n0:2,n1:1", "--log-json", "--prefix", "none", *LIGHT, "train.py", servers=servers)
    assert run.wait() == 1
    result = [json.loads(line) for line in run.stderr().splitlines() if line.startswith("{")]
    lines = [each for each in result if each["kind"] != "waiting"]
    assert [each["kind"] for each in lines] == ["failure", "end"]
    assert lines[0]["failure"]["first"]["host"] == "n1"
    assert lines[0]["run_id"]
    run.assert_nothing_left()


def test_equal_lines_of_two_hosts_are_shown_twice_without_a_prefix(job, tmp_path):
    write_program(tmp_path, "train.py", "import sys\nprint('  indented\\nalike', file=sys.stderr)\n")
    run = job(2, "--hosts", "n0:1,n1:1", "--prefix", "none", *LIGHT, "train.py")
    assert run.wait() == 0
    assert sorted(line for line in run.stderr().splitlines() if "waiting" not in line) == [
        "  indented",
        "  indented",
        "alike",
        "alike",
    ]


def test_a_rank_may_end_with_the_exit_code_of_an_ssh_that_failed(job, tmp_path):
    write_program(tmp_path, "train.py", "raise SystemExit(255)\n")
    run = job(2, "--hosts", "n1", "--nproc", "2", *LIGHT, "train.py")
    assert run.wait() == 255, run.stderr()
    assert "was lost" not in run.stderr()


def test_variables_and_secrets(job, tmp_path):
    names = ["NCCL_DEBUG", "MINE", "OTHERS", "GIVEN", "PYTHONSAFEPATH", "DDPLAUNCH_TOKEN"]
    write_program(tmp_path, "train.py", f"import os, time\nprint(*map(os.environ.get, {names}), flush=True)\n{WAITS}")
    given = {"NCCL_DEBUG": "WARN", "MINE": "a b", "OTHERS": "x", "DDPLAUNCH_TOKEN": "geheim"}
    run = job(2, "--hosts", "n0:1,n1:1", "--env", "MINE", "--env", "GIVEN=$'é", *LIGHT, "train.py", env=given)
    run.wait_for("WARN", 2)
    for host in run.hosts:
        assert host.find("train.py")
        assert not host.find("geheim")
    (tmp_path / "go").touch()
    assert run.wait() == 0, run.stderr()
    assert sorted(run.stdout().splitlines()) == [f"[{rank}] WARN a b None $'é None None" for rank in (0, 1)]


SLEEPS = """
import os
import subprocess
import sys
import time

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600) # train.py's child"])
print("up", os.getpid(), flush=True)
time.sleep(600)
"""

QUICK = ("--heartbeat-timeout", "3", "--grace", "2", *LIGHT)

AT_ONCE = ("--heartbeat-timeout", "2")
"""The least that there is, where silence is what happens."""


@pytest.fixture
def running(job, tmp_path):
    """A job of three hosts whose ranks, one each, sleep; n0 is not one of them unless it is named."""
    write_program(tmp_path, "train.py", SLEEPS)

    def begin(hosts="n1:1,n2:1", *options):
        run = job(3, "--hosts", hosts, *QUICK, *options, "train.py")
        run.wait_for("up", hosts.count(":"))
        return run

    return begin


@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143), (1, 129), (9, -9)])
def test_signals_end_the_job_everywhere(running, number, code):
    run = running("n0:1,n1:1")
    run.process.send_signal(number)
    assert run.wait(20) == code, run.stderr()
    run.assert_nothing_left()


WAITS_FOR_PREEMPTION = """
import time

from ddplaunch import runtime

print("up", flush=True)
while not runtime.preempted():
    time.sleep(0.05)
print("saved", flush=True)
"""


@pytest.mark.parametrize("name", ["USR2", "USR1", "TERM"])
def test_a_warning_reaches_the_ranks_everywhere(job, tmp_path, name):
    write_program(tmp_path, "train.py", WAITS_FOR_PREEMPTION)
    option = [] if name == "USR2" else ["--preempt-signal", name]
    run = job(2, "--hosts", "n0:1,n1:1", *QUICK, *option, "train.py")
    run.wait_for("up", 2)
    run.process.send_signal(getattr(signal, f"SIG{name}"))
    assert run.wait(30) == 75, run.stderr()
    assert sorted(run.stdout().splitlines()[2:]) == [f"[{rank}] saved" for rank in range(2)]
    assert run.stderr().count("to save a checkpoint") == 1
    assert run.stderr().count("ranks have") == 1
    run.assert_nothing_left()


LISTENS = """
import os, signal, time

seen = []
for number in (signal.SIGUSR1, signal.SIGRTMAX):
    signal.signal(number, lambda number, frame: seen.append(number))
print("up", flush=True)
while signal.SIGRTMAX not in seen:
    if signal.SIGUSR1 in seen:
        print("again", flush=True)
        signal.signal(signal.SIGUSR1, lambda number, frame: print("twice"))
        seen.clear()
    time.sleep(0.02)
"""


def test_a_signal_for_the_ranks_reaches_them_everywhere_once(job, tmp_path):
    write_program(tmp_path, "train.py", LISTENS)
    run = job(2, "--hosts", "n0:1,n1:1", *QUICK, "train.py")
    run.wait_for("up", 2)
    (guard,) = run.hosts[1].find(r"ddplaunch\.features\.ssh\.remote_launcher")
    os.kill(guard, signal.SIGUSR1)  # is for a launcher, and ends no process
    run.process.send_signal(signal.SIGUSR1)
    run.wait_for("again", 2)
    run.process.send_signal(signal.SIGRTMAX)
    assert run.wait(30) == 0, run.stderr()
    assert sorted(run.stdout().splitlines()) == ["[0] again", "[0] up", "[1] again", "[1] up"]
    run.assert_nothing_left()


def test_a_warning_to_launchers_that_start_is_not_lost(job, tmp_path):
    write_program(tmp_path, "train.py", WAITS_FOR_PREEMPTION)
    run = job(2, "--hosts", "n0:1,n1:1", *QUICK, "train.py")
    wait_until(lambda: run.hosts[1].find(LAUNCHER), "the launcher")
    run.process.send_signal(signal.SIGUSR2)
    assert run.wait(30) == 75, run.stderr()
    run.assert_nothing_left()


@pytest.mark.parametrize("what", ["^ssh .*n2|^/usr/bin/ssh .*n2", "features.ssh.remote_launcher", LAUNCHER, "zygote"])
def test_a_killed_process_between_launcher_and_ranks_ends_the_job(running, tmp_path, what):
    run = running("n1:1,n2:1", "--env", f"TMPDIR={tmp_path}")
    assert list(tmp_path.glob("ddplaunch-*"))
    host = run.hosts[0] if "ssh" in what else run.hosts[2]
    for pid in host.find(what)[:1]:
        os.kill(pid, 9)
    assert run.wait(30) not in (0, None)
    run.assert_nothing_left()
    assert not list(tmp_path.glob("ddplaunch-*"))


@pytest.mark.parametrize(
    ("hosts", "pulled", "expected"),
    [
        ("n1:1,n2:1", 2, "was lost"),
        ("n1:1,n2:1", 0, ""),
        ("n1:1", 1, "n1 was lost: Timeout, server n1 not responding."),
    ],
    ids=["at a host", "here", "at the only host"],
)
def test_a_host_without_network_is_lost(running, hosts, pulled, expected):
    run = running(hosts, *AT_ONCE)
    run.hosts[pulled].cable.unplug()
    assert run.wait(30) == 69, run.stderr()
    assert expected in run.stderr()
    run.assert_nothing_left(timeout=15)


ONE_MORE = """
import os, time
again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
print("again" if again else "up", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.uname().nodename, flush=True)
time.sleep(0 if again else 1000)
"""


@pytest.mark.parametrize("fault", ["power_off", "the launcher is killed"])
def test_a_spare_takes_the_place_of_a_lost_host(job, tmp_path, fault):
    write_program(tmp_path, "train.py", ONE_MORE)
    run = job(4, "--hosts", "n[1-3]:1", "--spares", "1", *AT_ONCE, *LIGHT, "train.py")
    run.wait_for("up", 2)
    if launcher := run.hosts[2].find(LAUNCHER) if "launcher" in fault else []:
        os.kill(launcher[0], signal.SIGKILL)
    else:
        getattr(run.hosts[2], fault)()
    assert run.wait(30) == 0, run.stderr()
    assert "node 2 (n3) takes the place of node 1 (n2)" in run.stderr()
    assert sorted(run.stdout().splitlines()[2:]) == ["[0] again 0 of 2 n1", "[1] again 1 of 2 n3"]
    run.assert_nothing_left(timeout=15)


def test_the_first_host_keeps_its_place(job, tmp_path):
    write_program(tmp_path, "train.py", ONE_MORE)
    run = job(4, "--hosts", "n[1-3]:1", "--spares", "1", *AT_ONCE, *LIGHT, "train.py")
    run.wait_for("up", 2)
    run.hosts[1].kill_all()
    assert run.wait(30) == 69, run.stderr()
    lost = re.findall(r"(?m)^ddplaunch: (?:node 0 \(n1\)|n1) was lost: ", run.stderr())
    assert len(lost) == 1, run.stderr()  # by a launcher there, or by ssh's end here, whichever comes first
    run.assert_nothing_left(timeout=15)


def test_every_problem_is_reported_before_anything_starts(sshd, job, tmp_path):
    import torch

    write_program(tmp_path, "there/here/train.py", "open('started', 'w')\n")
    servers = sshd(10)
    hosts = servers.network.hosts
    servers.forget_key(hosts[1])
    hosts[2].power_off()
    hosts[3].run("mount", "-t", "tmpfs", "none", tmp_path / "there/here")
    hosts[4].run("mount", "-t", "tmpfs", "none", tmp_path / "there")
    version = write_program(tmp_path, "version.py", '__version__ = "1.0.0"\ncuda = None\n')
    hosts[5].run("mount", "--bind", version, torch.__file__.replace("__init__.py", "version.py"))
    hosts[6].run("mount", "-t", "tmpfs", "none", Path(torch.__file__).parent)
    hosts[7].run("mount", "-t", "tmpfs", "none", Path(ddplaunch.__file__).parent)
    hosts[8].run("mount", "-t", "tmpfs", "none", Path(sys.executable).parent)
    version = write_program(tmp_path, "__init__.py", '__version__ = "0.0.1"\nTYPE_CHECKING = False\n')
    hosts[9].run("mount", "--bind", version, ddplaunch.__file__)
    servers.config.write_text(servers.config.read_text() + "  ConnectTimeout 2\n")
    run = Job(servers, tmp_path / "there/here", "--hosts", "n[0-9]:1", "train.py")
    assert run.wait() == 69
    first, *rows = run.stderr().splitlines()
    assert first == refusal(9, 10)
    for row, text in zip(
        rows,
        [
            "n1  the host key of n1 has changed: if the machine is new, `ssh-keygen -R n1`",
            "n2  ssh: connect to host n2 port 22: (No route to host|Connection timed out)",
            "n3  no such script: train.py",
            f"n4  {tmp_path}/there/here: No such file or directory",
            "n5  torch is 1.0 there, 2.* on n0",
            "n6  torch is missing there, 2.* on n0",
            "n7  ddplaunch is not installed for the Python on that host .--remote-python selects another.",
            f"n8  .*{sys.executable}.*No such file or directory .--remote-python selects another Python.",
            f"n9  ddplaunch 0.0.1 there, {ddplaunch.__version__} here",
        ],
        strict=True,
    ):
        assert re.fullmatch(f"  {text}", row), run.stderr()
    assert not list(tmp_path.rglob("started"))
    run.assert_nothing_left([host for host in hosts if host.alive])


def test_one_machine_under_two_names_is_refused(sshd, job, tmp_path):
    servers = sshd(2)
    write_program(tmp_path, "train.py", "")
    again = servers.network.hosts[0].address
    run = job(2, "--hosts", f"n0:1,n1:1,{again}:1", "--spares", "1", "train.py", servers=servers)
    assert run.wait() == 2
    assert f"  {again}  it is the same machine as n0: name it once" in run.stderr().splitlines()
    assert "was lost" not in run.stderr()


@pytest.mark.parametrize("program", [False, True])
def test_torch_is_missing_on_the_first_host(sshd, job, tmp_path, program):
    """A first host without torch is named, and the others are not compared with it; a program may not need torch."""
    import torch

    servers = sshd(2)
    servers.network.hosts[0].run("mount", "-t", "tmpfs", "none", Path(torch.__file__).parent)
    write_program(tmp_path, "train.py", "")
    words = ["--no-python", "/bin/echo", "done"] if program else ["train.py"]
    run = job(2, "--hosts", "n0:1,n1:1", *words, servers=servers)
    if program:
        assert run.wait() == 0, run.stderr()
        assert sorted(run.stdout().splitlines()) == ["[0] done", "[1] done"]
    else:
        assert run.wait() == 2
        first, row = run.stderr().splitlines()
        assert first == refusal(1, 2)
        assert re.fullmatch("  n0  torch is missing there, 2.* on n1", row)


def test_a_port_that_is_taken(job, sshd, tmp_path):
    write_program(tmp_path, "train.py", "")
    servers = sshd(3)
    script = "import socket, time; s = socket.create_server(('', 29500)); print(1, flush=True); time.sleep(600)"
    with servers.network.hosts[1].start([sys.executable, "-c", script], stdout=subprocess.PIPE) as taken:
        taken.stdout.read(1)
        run = job(3, "--hosts", "n1:1,n2:1", "train.py", servers=servers)
        assert run.wait() == 2
        assert "  n1  port 29500: Address already in use\n" in run.stderr()
        taken.kill()


def test_a_host_that_refuses_the_job_ends_the_wait_of_the_others(job, tmp_path):
    write_program(tmp_path, "train.py", "")
    run = job(3, "--hosts", "n1:1,n2", *QUICK, "--gpus", "7", "train.py")
    assert run.wait(40) == 2
    assert "Error: " in run.stderr()
    run.assert_nothing_left()
