"""Tests of real launchers that join, in any order, while other programs connect to the control port."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import struct
import subprocess
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from ddplaunch.cli.node_config_options import QUIET_WAIT_S
from ddplaunch.core.messages import PROTOCOL_VERSION
from ddplaunch.observe.history import history_store
from tests.conftest import BackgroundJob, clean_environment, ddplaunch_command, free_port, wait_until, write_program
from tests.constant_override import launcher_with_constant
from tests.scaled_timeouts import scaled_timeout

HELLO = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "at", os.environ["MASTER_ADDR"],
      "token", os.environ.get("DDPLAUNCH_TOKEN"), "through", os.environ.get("GLOO_SOCKET_IFNAME"),
      "run", os.environ["TORCHELASTIC_RUN_ID"])
"""

WAITS_FOR_GATE = """
    import os, time

    print("world", os.environ["WORLD_SIZE"], flush=True)
    while not os.path.exists("gate"):
        time.sleep(0.01)
"""


class Nodes:
    """Launchers of one job on this machine, which differ in their node rank."""

    def __init__(self, start, folder: Path, nnodes: str | int, *options: str | Path) -> None:
        self._start, self.nnodes, self.options = start, nnodes, options
        self.port = free_port()
        write_program(folder, "hello.py", HELLO)

    def start(self, node_rank: int, *more: str | Path, target: str | Path = "hello.py", **popen) -> BackgroundJob:
        return self._start(
            *("run", "--nnodes", str(self.nnodes), "--node-rank", str(node_rank), "--nproc", "1", "--start", "exec"),
            *("--master-addr", "127.0.0.1", "--master-port", str(self.port), *self.options, *more, target),
            **popen,
        )

    def call(self) -> socket.socket:
        """Connect to the control port once it listens."""
        deadline = time.monotonic() + scaled_timeout(30)
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port + 1))
            except (ConnectionRefusedError, ConnectionResetError):  # not yet, or just trying whether it may listen
                assert time.monotonic() < deadline


@pytest.fixture
def nodes(start_ddplaunch, tmp_path):
    return lambda nnodes, *options: Nodes(start_ddplaunch, tmp_path, nnodes, *options)


@pytest.mark.ci
def test_nodes_of_any_size_join_in_any_order(nodes):
    job = nodes(3)
    launchers = {node: job.start(node, *(("--nproc", "3") if node == 0 else ())) for node in (2, 1, 0)}
    for launcher in launchers.values():
        assert launcher.wait() == 0, launcher.stderr()
        launcher.assert_nothing_left()
    for node, rank in ((1, 3), (2, 4)):
        assert launchers[node].stdout().startswith(f"[{rank}] rank {rank} of 5 at 127.0.0.1 token None through lo")
    assert launchers[0].stdout().count("of 5") == 3
    assert len({launcher.stdout().split()[-1] for launcher in launchers.values()}) == 1, "one run id"


def test_a_log_shows_the_wait_for_nodes_when_it_changes(nodes):
    job = nodes(3, "--join-timeout", "60")
    first = job.start(0)
    wait_until(lambda: "1/3 nodes joined, waiting for node 1, 2 (00:00)" in first.stderr(), "the account")
    second = job.start(2)
    for launcher in (first, second):
        wait_until(lambda seen=launcher: "2/3 nodes joined, waiting for node 1 (" in seen.stderr(), "the account")
    first.signal(signal.SIGINT)
    assert (first.wait(10), second.wait(10)) == (130, 130)
    assert "Ctrl-C on node 0 (" in second.stderr()
    for launcher in (first, second):
        assert "Traceback" not in launcher.stderr()
        launcher.assert_nothing_left()


BY_MPIRUN = {
    f"OMPI_COMM_WORLD_{name}": value for name, value in {"SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items()
}


@pytest.mark.ci
def test_the_wait_for_nodes_is_shown_later_under_a_cluster(start_ddplaunch, tmp_path):
    """Some are up seconds before the others."""
    assert QUIET_WAIT_S == 5
    sooner = launcher_with_constant(tmp_path, "cli.node_config_options.QUIET_WAIT_S", 1.0)
    write_program(tmp_path, "hello.py", HELLO)
    words = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--nproc", "1", "--start", "exec")
    launchers = []
    for rank in (0, 1):
        variables = {**BY_MPIRUN, "OMPI_COMM_WORLD_RANK": str(rank)}
        launchers.append(start_ddplaunch("run", *words, "hello.py", env=variables, executable=sooner))
        if rank == 0:
            wait_until(lambda: "waiting for" in launchers[0].stderr(), "the account")
            assert "(00:00)" not in launchers[0].stderr(), launchers[0].stderr()
    assert [launcher.wait() for launcher in launchers] == [0, 0]
    assert "waiting for" not in launchers[1].stderr()


def test_a_terminal_shows_the_wait_for_nodes_in_one_line(nodes, tmp_path):
    """The line is drawn over itself, each second."""
    job = nodes(2)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ddplaunch_command("run", "--nnodes", "2", "--node-rank", "0", "--nproc", "1", "--master-addr", "127.0.0.1",
                "--master-port", str(job.port), "hello.py"),
        cwd=tmp_path, env=clean_environment({"TERM": "xterm"}), stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while b"(00:01)" not in shown:
        shown += os.read(ours, 4096)
    assert b"\r\x1b[Kddplaunch: 1/2 nodes joined, waiting for node 1 (00:01)" in shown
    assert b"\n" not in shown
    process.send_signal(signal.SIGINT)
    assert process.wait(scaled_timeout(10)) == 130
    os.close(ours)


def test_join_timeout(nodes):
    job = nodes(2, "--join-timeout", "0.5")
    first, second = job.start(0), nodes(2, "--join-timeout", "0.5").start(1)
    assert (first.wait(20), second.wait(20)) == (69, 69)
    assert (
        "only 1 of 2 nodes joined in 0.5 s (--join-timeout): node 1 is missing\nddplaunch:   does the same"
        in first.stderr()
    )
    assert f"port {job.port + 1} of node 0, which is this machine (127.0.0.1)?" in first.stderr()
    assert "node 0 was not reached in 0.5 s (--join-timeout): 127.0.0.1:" in second.stderr()
    assert "connection refused" in second.stderr()


def test_another_protocol_version_is_refused(nodes):
    job = nodes(2)
    with socket.create_server(("127.0.0.1", job.port + 1)) as server:
        launcher = job.start(1)
        caller, _ = server.accept()
        body = json.dumps({"op": "Welcome", "ddplaunch": PROTOCOL_VERSION + 1, "nonce": "x"}).encode()
        caller.send(struct.pack("!I", len(body)) + body)
        assert launcher.wait(20) == 2
    assert f"it speaks protocol {PROTOCOL_VERSION + 1}, this one {PROTOCOL_VERSION}" in launcher.stderr()


def test_a_stale_script_is_an_error_on_every_node(nodes, tmp_path):
    write_program(tmp_path, "other/hello.py", HELLO + "# newer\n")
    job = nodes(2)
    launchers = job.start(0), job.start(1, target="other/hello.py")
    assert [launcher.wait(20) for launcher in launchers] == [2, 2]
    first, second = (launcher.stderr().split("Error: ")[1] for launcher in launchers)
    assert first == second
    assert "the content of other/hello.py differs: node 0" in first
    assert len(first.splitlines()) <= 3
    for launcher in launchers:
        assert launcher.stdout() == ""
        launcher.assert_nothing_left()


@pytest.mark.slow
def test_another_python_is_an_error_unless_allowed(nodes, tmp_path):
    """A torch of another version, as its own version.py has it."""
    write_program(tmp_path, "old/torch/__init__.py", "")
    write_program(tmp_path, "old/torch/version.py", "__version__ = '2.4.1'\ncuda: 'str | None' = '12.1'\n")
    job = nodes(2)
    first = job.start(0)
    second = job.start(1, env={"PYTHONPATH": str(tmp_path / "old")})
    assert (first.wait(20), second.wait(20)) == (2, 2), second.stderr()
    for launcher in (first, second):
        assert "torch's version differs: node 0" in launcher.stderr()
        assert "has 2.4\n" in launcher.stderr() or "has 2.4," in launcher.stderr()
    assert "--allow-mismatch" in first.stderr()


@pytest.mark.ci
def test_launchers_with_a_wrong_token_are_refused(nodes):
    """The job waits on, and the right launcher joins later. The token itself is never sent."""
    job = nodes(2)
    right = {"DDPLAUNCH_TOKEN": "s3cret"}
    first = job.start(0, env=right)
    with job.call() as caller:
        seen = caller.recv(4096)
    for environ, expected in (({"DDPLAUNCH_TOKEN": "wrong"}, "its token differs"), ({}, "it has no token")):
        wrong = job.start(1, env=environ)
        assert wrong.wait(20) == 2
        assert expected in wrong.stderr()
        assert "DDPLAUNCH_TOKEN" in wrong.stderr()
    second = job.start(1, "--token", "s3cret")
    assert (first.wait(20), second.wait(20)) == (0, 0), first.stderr() + second.stderr()
    assert ": 1 disconnected, 1 its token differs, 1 it has no token" in first.stderr()
    assert b"s3cret" not in seen
    assert "token None" in first.stdout()


def test_a_token_that_node_0_does_not_have(nodes):
    job = nodes(2)
    first, second = job.start(0), job.start(1, "--token", "some")
    assert second.wait(20) == 2
    assert "it has a token, and node 0 has none" in second.stderr()
    first.signal(signal.SIGINT)
    assert first.wait(20) == 130


def test_a_single_node_listens_on_loopback_only(start_ddplaunch, tmp_path):
    write_program(tmp_path, "wait.py", "import sys; print('up', flush=True); sys.stdin.read()")
    launcher = start_ddplaunch(
        "run", "--nproc", "2", "--start", "exec", "--stdin", "1", "wait.py", stdin=subprocess.PIPE
    )
    launcher.wait_for("up", 2)
    import psutil

    listening: set[str] = set()
    for pid in launcher.left():
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            connections = psutil.Process(pid).net_connections("tcp")
            listening.update(each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN)
    assert listening <= {"127.0.0.1"}
    launcher.process.stdin.close()
    assert launcher.wait() == 0


def test_a_preload_that_fails_on_one_node_is_reported_on_all(start_ddplaunch, tmp_path):
    write_program(tmp_path, "hello.py", HELLO)
    write_program(tmp_path, "here/extra.py", "")
    where = ("--nnodes", "2", "--nproc", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    shared = (*where, "--preload", "extra")
    first = start_ddplaunch("run", "--node-rank", "0", *shared, "hello.py", env={"PYTHONPATH": str(tmp_path / "here")})
    wait_until(lambda: "1/2 nodes joined" in first.stderr(), "the first")
    second = start_ddplaunch("run", "--node-rank", "1", *shared, "hello.py")
    assert (first.wait(20), second.wait(20)) == (2, 2)
    assert "No module named 'extra'" in second.stderr()


def test_logs_of_nodes_that_share_a_file_system(nodes, tmp_path):
    job = nodes(2, "--log-dir", "logs", "--run-id", "mine")
    first, second = job.start(0), job.start(1)
    assert (first.wait(20), second.wait(20)) == (0, 0), first.stderr() + second.stderr()
    folders = tmp_path / "logs" / "mine"
    assert sorted(path.name for path in folders.iterdir()) == ["node-0", "node-1"]
    assert (folders / "node-1" / "rank-1.log").read_text().startswith("rank 1 of 2")
    plans = [json.loads((folders / f"node-{number}" / "plan.json").read_text()) for number in (0, 1)]
    assert [node["source"] for node in plans[0]["nodes"]] == ["joined", "joined"]
    assert [[rank["rank"] for rank in plan["ranks"]] for plan in plans] == [[0, 1], [1]], "node 0 alone knows all"
    assert [(plan["nnodes"], plan["world_size"], plan["node_rank"]) for plan in plans] == [(2, 2, 0), (2, 2, 1)]


def test_a_preemption_notice_while_node_0_is_waited_for(start_ddplaunch, tmp_path):
    job = Nodes(start_ddplaunch, tmp_path, 2).start(1)
    wait_until(lambda: "waiting for" in job.stderr(), "the wait")
    job.signal(signal.SIGUSR2)
    assert job.wait() == 75
    assert "no rank was running" in job.stderr()
    job.assert_nothing_left()


def test_a_name_of_node_0_that_does_not_resolve_is_waited_for(start_ddplaunch, tmp_path):
    """In Docker compose a name exists only with its container; the same line shows a typo."""
    write_program(tmp_path, "hello.py", HELLO)
    where = ("--master-addr", "no.such.host.invalid", "--nnodes", "2", "--node-rank", "auto")
    job = start_ddplaunch("run", "--nproc", "1", "--start", "exec", "--join-timeout", "2", *where, "hello.py")
    wait_until(lambda: "waiting for node 0: no.such.host.invalid does not resolve yet (00:" in job.stderr(), "the line")
    assert job.wait() == 69
    assert "2 s (--join-timeout): no.such.host.invalid does not resolve" in job.stderr()


def test_node_0_waits_for_its_own_name(start_ddplaunch, tmp_path):
    """It is not refused at once where the other nodes wait for the same name."""
    write_program(tmp_path, "hello.py", HELLO)
    where = ("--master-addr", "no.such.host.invalid", "--nnodes", "2", "--node-rank", "0")
    job = start_ddplaunch("run", "--nproc", "1", "--start", "exec", "--join-timeout", "0.5", *where, "hello.py")
    assert job.wait() == 69
    assert job.stderr().splitlines() == [
        "ddplaunch: cannot resolve --master-addr no.such.host.invalid, which is this machine; retrying",
        "Error: --master-addr no.such.host.invalid does not resolve on this machine in 0.5 s (--join-timeout)",
        "  give node 0's address, like 10.0.0.1",
    ]


@pytest.mark.ci
def test_a_node_that_joins_again_is_in_the_same_record(nodes, tmp_path, run_in_fork):
    """A spare that takes the place of a lost node is in it too, where nodes share the home directory."""
    write_program(tmp_path, "waits.py", WAITS_FOR_GATE)
    name = f"again-{uuid.uuid4().hex[:8]}"  # the record of a run before with the same name would count too
    job = nodes("1:2", "--grow", "--grace", "10", "--run-id", name, "--log-dir", "logs")
    first, second = (job.start(number, target="waits.py") for number in range(2))
    for launcher in (first, second):
        launcher.wait_for("world 2")
    wait_until(lambda: len(history_store.read_node_records(name)) == 2, "the records of both nodes")
    os.kill(second.process.pid, signal.SIGKILL)
    first.wait_for("world 1")
    second = job.start(1, target="waits.py")
    second.wait_for("world 2")
    write_program(tmp_path, "gate", "")
    assert (first.wait(20), second.wait(20)) == (0, 0), first.stderr()
    logs = tmp_path / "logs"
    assert sorted(str(path.relative_to(logs)) for path in logs.glob("*/*")) == [
        f"{name}/node-0",
        f"{name}/node-1",
        f"{name}/node-1.2",
    ]
    report = run_in_fork("report", name).stdout.splitlines()
    ends = [line.partition(")")[2] for line in report if line.startswith("  node 1 (")]
    assert [end.split(":")[1] for end in ends] == [" lost", " succeeded"]
    assert f"{name}: succeeded" in report
    assert len([line for line in report if line.startswith("1 ") and "exit code 0" in line]) == 1
    assert [row.split()[0] for row in run_in_fork("ps", "--all").stdout.splitlines() if name in row] == [name]
