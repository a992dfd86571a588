"""Tests of connections to the control port that do not belong to the job: they are closed soon."""

from __future__ import annotations

import resource
import signal
import socket

import psutil
import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.net import listener
from tests.conftest import wait_until, write_program
from tests.core.job.test_joining import Nodes
from tests.core.job_configs import make_job_config
from tests.core.net.fake_peer import FakePeer, make_hello, make_node_spec

WAITS = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


def held(launcher) -> int:
    return psutil.Process(launcher.process.pid).num_fds()


def refused(job, count: int, body) -> list[FakePeer]:
    """Connections that are asked to close, and stay open."""
    peers = [FakePeer(job.call()) for _ in range(count)]
    for peer in peers:
        peer.send("NodeHello", body)
        assert peer.receive("JoinRefused")
    return peers


def test_unrelated_connections_leave_files_for_nodes_and_ranks(monkeypatch):
    """The oldest are closed."""
    limit = listener.RESERVED_FDS + 2 * listener.RESERVED_FDS_PER_RANK + 10 + 6
    monkeypatch.setattr(listener, "raise_fd_limit", lambda: limit)
    loop = EventLoop()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        accepting = listener.ControlPortListener(loop, sock, make_job_config(min_nodes=10, max_nodes=10), 2, None)
        peers = [socket.create_connection(sock.getsockname()) for _ in range(8)]
        for step in range(32):
            loop.call_soon(lambda: None)  # so that it does not wait
            loop.run_once()
            if step == 16:
                peers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert accepting.rejected == {"sent nothing": 2, "spoke another protocol": 1}
        accepting.close()
    for peer in peers:
        peer.close()


@pytest.mark.ci
def test_refused_connections_are_closed(start_ddplaunch, tmp_path):
    """Those without the token before the job starts, and those that come when it runs."""
    write_program(tmp_path, "waits.py", WAITS)
    job = Nodes(start_ddplaunch, tmp_path, 2, "--token", "s3cret", "--grace", "1")
    launcher = job.start(0, target="waits.py")
    job.call().close()
    wait_until(lambda: "1/2 nodes joined" in launcher.stderr(), "the account")
    before = held(launcher)
    peers = refused(job, 40, make_hello())
    assert held(launcher) <= before + 41
    wait_until(lambda: held(launcher) <= before, "the end of their connections")
    second = job.start(1, target="waits.py")
    for each in (launcher, second):
        each.wait_for("up")
    assert "its token" not in second.stderr()
    assert "connections to the control port did not belong to this job: 40 it has no token" in launcher.stderr()
    before = held(launcher)
    peers += refused(job, 40, make_hello(node_spec=make_node_spec(1)))
    wait_until(lambda: held(launcher) <= before, "the end of their connections")
    launcher.signal(signal.SIGINT)
    assert [each.wait() for each in (launcher, second)] == [130, 130]
    del peers


FAILS_ONCE = """
    import os, pathlib, sys, time

    print("up", flush=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        while not pathlib.Path("enough").exists():
            time.sleep(0.01)
        sys.exit(int(os.environ["RANK"] == "0"))
"""


@pytest.mark.ci
def test_unrelated_connections_do_not_use_up_descriptors(start_ddplaunch, tmp_path):
    write_program(tmp_path, "once.py", FAILS_ONCE)
    job = Nodes(start_ddplaunch, tmp_path, 2, "--grace", "1", "--max-restarts", "1", "--log-dir", "logs")

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (110, 110))

    jobs = [job.start(rank, target="once.py", **({"preexec_fn": few} if rank == 0 else {})) for rank in (0, 1)]
    for each in jobs:
        each.wait_for("up")
    unrelated = [job.call() for _ in range(200)]
    wait_until(lambda: sum(_gone(each) for each in unrelated) > 100, "that the first have been turned away")
    (tmp_path / "enough").touch()
    assert [each.wait() for each in jobs] == [0, 0], jobs[0].stderr() + jobs[1].stderr()
    assert "restart 1 of 1" in jobs[0].stderr()
    for connection in unrelated:
        connection.close()


def _gone(sock) -> bool:
    """Whether the other side has closed; its last message is read first."""
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True
