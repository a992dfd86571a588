"""Tests of the options for SSH, ``--hosts`` and others, without a host; test_hosts.py has host lists."""

import json
import shlex

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.features.ssh.ssh_launch import forwarded_environment
from tests.conftest import assert_refused, conflict, write_program

WITHOUT = "leave it out"

REFUSED = [
    ("--hosts ''", "--hosts has an empty value", "leave it out"),
    ("--hosts a,,b", "--hosts a,,b: a host has no name", "--hosts n1:4,n2:4"),
    ("--hostfile none", "--hostfile none: No such file", "a relative path starts at the current folder"),
    ("--hostfile wrong", "wrong:2: cannot read 'cpus=4'", "write one host a line: n1, n1:4, n1 slots=4"),
    ("--hosts a --hostfile b", "--hosts a and --hostfile b contradict each other", "leave one"),
    ("--include a", "--include works only with --hosts", "--hosts n1:4,n2:4"),
    ("--exclude a", "--exclude works only with --hosts", "--hosts n1:4,n2:4"),
    ("--env A=1", "--env works only with --hosts", "--hosts n1:4,n2:4"),
    ("--remote-python x", "--remote-python works only with --hosts", "--hosts n1:4,n2:4"),
    ("--hosts a --exclude a:0", "--exclude a:0: the number of slots of a is not known", "a:8"),
    ("--hosts a,b --exclude a@b", "--exclude a@b leaves no host", "leave at least one"),
    ("--hosts a,b --nnodes 2", conflict("--nnodes", "--hosts"), WITHOUT),
    ("--hosts a,b --node-rank 0", conflict("--node-rank", "--hosts"), WITHOUT),
    ("--hosts a,b --control none", conflict("--control none", "--hosts"), WITHOUT),
    ("--hosts a,b --stdin 0", conflict("--stdin", "--hosts"), WITHOUT),
    ("--hosts a,b --cluster slurm", conflict("--cluster", "--hosts"), WITHOUT),
    ("--hosts a,b --grow", conflict("--grow", "--hosts"), WITHOUT),
    ("--hosts a,b --on-stall stop", "--on-stall stop works only with --stall-timeout", "--stall-timeout 10m"),
    ("--hosts a,b --merge --prefix '{host} '", conflict("--merge", "--prefix {host}"), "--prefix '[{rank}]'"),
    (
        "--hosts a,b --spares 1",
        "--spares 1 of 2 hosts leaves 1 for the ranks",
        "name at least two hosts more than spares",
    ),
    ("--hosts a:2,b --nproc 2", "--nproc 2 and the slots of the hosts contradict each other", "give one"),
    ("--hosts a:4,b --include a:0 --gpus 1", "--gpus 1 and the chosen slots contradict each other", "leave one"),
    ("--hosts localhost,b", "localhost is another machine on each", "--master-addr"),
    ("--hosts '[::1],b'", "::1 is another machine", "--master-addr"),
    ("--hosts a --env 1A=2", "'1A' is not the name of a variable", "--env NAME=VALUE"),
    (
        "--hosts a --env NO_SUCH_VARIABLE",
        "--env NO_SUCH_VARIABLE: the variable is not set here",
        "--env NO_SUCH_VARIABLE=VALUE",
    ),
]


@pytest.mark.parametrize(("line", "complaint", "hint"), REFUSED)
def test_contradicting_host_options_are_refused(run_in_fork, tmp_path, line, complaint, hint):
    write_program(tmp_path, "train.py", "open('started', 'w') ; 1\n")
    write_program(tmp_path, "wrong", "a:4\nb cpus=4\n")
    done = run_in_fork("run", *shlex.split(line), "train.py")
    first, *rest = assert_refused(done).splitlines()
    assert complaint in first
    assert hint in "".join(rest)
    assert not (tmp_path / "started").exists()


LONG = [
    ("--hosts", "n" * 5000),
    ("--hosts", "n1," * 40_000),
    ("--include", "x" * 100_000),
    ("--exclude", "a:" + "9" * 5000),
    ("--env", "1" * 100_000 + "=secret"),
]


@pytest.mark.parametrize(("option", "value"), LONG, ids=range(len(LONG)))
def test_long_values_are_shortened_in_refusals(run_in_fork, tmp_path, option, value):
    write_program(tmp_path, "train.py", "")
    hosts = [] if option == "--hosts" else ["--hosts", "a:4,b:4"]
    done = run_in_fork("run", *hosts, option, value, "train.py", timeout=2)
    lines = assert_refused(done).splitlines()
    assert lines[0].startswith(f"Error: {option} ")
    assert all(len(line) <= 420 and line.isprintable() for line in lines)
    assert "secret" not in done.stderr


def test_hosts_needs_an_ssh_client(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    assert_refused(
        run_in_fork("run", "--hosts", "a", "train.py", env={"PATH": str(tmp_path)}), "needs ssh, which is not on PATH"
    )


def test_a_dry_run_shows_the_hosts_and_no_command_for_other_nodes(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    write_program(tmp_path, "hosts", "# two\nn1.x.org slots=2 max_slots=4\nn2.x.org slots=1 # and one\n")

    def dry_run(*words: str):
        return run_in_fork("run", "--dry-run", *words, "train.py", env={"SLURM_JOB_ID": "7"}).stdout

    def hosts(*words: str):
        return [rank["host"] for rank in json.loads(dry_run("--json", *words))["ranks"]]

    shown = dry_run("--hosts", "n1:2,gpu17:1,n9:1", "--exclude", "n9")
    assert [line for line in shown.splitlines() if line.startswith("rank ")] == [
        "rank 0  node 0  host n1     local rank 0  device cpu  cpus any",
        "rank 1  node 0  host n1     local rank 1  device cpu  cpus any",
        "rank 2  node 1  host gpu17  local rank 0  device cpu  cpus any",
    ]
    assert "ranks per node: 2,1 (--hosts)\ndevices: cpu (assumed)\nmaster address: n1 (the first host)\n" in shown
    assert "over SSH: node 0 is n1, node 1 is gpu17" in shown
    assert "ddplaunch run" not in shown, "SSH starts the nodes"
    unknown = dry_run("--json", "--hosts", "n1:2,n2")
    assert "n2: one rank per GPU; their number is not known here" in json.loads(unknown)["notes"]
    assert "is not known here" not in dry_run("--json", "--hosts", "n1,n2", "--nproc", "2")
    assert hosts("--hosts", "n1:2,n2") == ["n1", "n1", "n2"]
    assert hosts("--hosts", "n[1-3]:2", "--spares", "1") == ["n1", "n1", "n2", "n2"]
    assert hosts("--hostfile", "hosts") == ["n1.x.org", "n1.x.org", "n2.x.org"]


def test_variables_that_go_along():
    ours = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "TORCH_SHOW_CPP_STACKTRACES": "1"}
    ours |= {"OMP_NUM_THREADS": "2", "LD_LIBRARY_PATH": "/x", "PYTHONPATH": "/y"}
    rest = {"PATH": "/bin", "HOME": "/root", "HF_TOKEN": "s", "MASTER_ADDR": "a", "RANK": "0", "UID": "0"}
    assert forwarded_environment((), {**ours, **rest}) == ours
    more = {"HF_TOKEN": "s", "A": "b=c", "EMPTY": "", "NCCL_DEBUG": "WARN"}
    typed = ("HF_TOKEN", "A=b=c", "EMPTY=", "NCCL_DEBUG=WARN")
    assert forwarded_environment(typed, {**ours, **rest}) == {**ours, **more}
    with pytest.raises(UsageError):
        forwarded_environment(("A B=1",), ours)
