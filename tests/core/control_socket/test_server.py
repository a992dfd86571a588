"""Tests of the control socket of a running job: requests of its user, of other users, and of attackers."""

import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.types import encode
from ddplaunch.cli import client
from ddplaunch.cli.client import JobNotResponding
from ddplaunch.core.control_socket import server, socket_dir
from ddplaunch.core.control_socket.job_status import JobState, RankState, Status
from ddplaunch.core.control_socket.server import MAX_CLIENTS, MAX_REQUEST_BYTES, ControlSocket
from ddplaunch.core.control_socket.status_request import (
    JobEndReply,
    StatusQuery,
    StopJobRequest,
    StopReply,
    WaitRequest,
)
from tests.conftest import BackgroundJob, is_alive, wait_until
from tests.constant_override import launcher_with_constant
from tests.scaled_timeouts import scaled_timeout

SLEEPS = "echo up; exec sleep 600"
STUBBORN = "trap '' TERM INT; echo up; while :; do sleep 0.1; done"

Run = Callable[..., BackgroundJob]


@pytest.fixture
def runtime(tmp_path_factory, monkeypatch) -> Path:
    """A short path: those of sockets are."""
    path = tmp_path_factory.mktemp("r")
    path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    return path


@pytest.fixture
def run(start_ddplaunch, runtime) -> Run:
    """Start two ranks, and again where one fails; ``path`` is the job's control socket."""

    def begin(
        run_id: str = "mine", program: str = SLEEPS, executable: Path | None = None, **environ: str
    ) -> BackgroundJob:
        options = ("--nproc", "2", "--max-restarts", "9", "--min-uptime", "0", "--no-history", "--grace", "600")
        words = ("run", "--run-id", run_id, *options, "--no-python", "sh", "-c", program)
        job = start_ddplaunch(*words, env={"XDG_RUNTIME_DIR": str(runtime), **environ}, executable=executable)
        job.wait_for("up", 2)
        job.path = find_socket_path(job)
        return job

    return begin


@pytest.fixture(scope="module")
def shared_job(tmp_path_factory) -> Iterator[BackgroundJob]:
    """A job of two ranks for tests that only send requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", runtime := str(tmp_path_factory.mktemp("r")))
        words = ("run", "--nproc", "2", "--no-history", "--no-python", "sh", "-c", SLEEPS)
        job = BackgroundJob(tmp_path_factory.mktemp("shared"), words, {"XDG_RUNTIME_DIR": runtime})
        try:
            job.wait_for("up", 2)
            job.path = find_socket_path(job)
            wait_for_status(job)
            yield job
        finally:
            job.signal(signal.SIGTERM)
            job.wait()


def find_socket_path(job: BackgroundJob) -> str:
    """The path of a job's control socket."""
    found: list[str] = []

    def there() -> bool:
        found[:] = [path for path in socket_dir.list_sockets() if path.endswith(f".{job.process.pid}")]
        return bool(found)

    wait_until(there, "its control socket")
    return found[0]


def wait_for_status(job: BackgroundJob, state: JobState = JobState.RUNNING, attempt: int = 0) -> Status:
    """Wait until the job has this state, and return its status."""
    found: list[Status] = []

    def reached() -> bool:
        found[:] = [client.send_request(job.path, StatusQuery())]
        return (found[0].state, found[0].attempt) == (state, attempt)

    wait_until(reached, f"{state} of attempt {attempt}")
    return found[0]


def call(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(scaled_timeout(20))
    sock.connect(path)
    return sock


def list_own_sockets(runtime: Path) -> list[str]:
    """List the sockets of this test; other runs of this user may have sockets elsewhere."""
    return [path for path in socket_dir.list_sockets() if path.startswith(str(runtime))]


def test_the_status_while_ranks_run_and_after_a_restart(run):
    name = "a-b.c_7" + "x" * 93  # longer than a socket's path may be
    job = run(name)
    status = wait_for_status(job)
    assert (status.run_id, status.pid) == (name, job.process.pid)
    assert stat.S_IMODE(os.stat(job.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(job.path)).st_mode) == 0o700
    assert status.target == f"sh -c {SLEEPS}"
    assert (status.node_rank, status.world_size, status.restarts) == (0, 2, 0)
    assert [rank.state for rank in status.ranks] == [RankState.RUNNING] * 2
    assert all(is_alive(rank.pid) for rank in status.ranks)
    assert abs(status.since - time.time()) < scaled_timeout(20)
    os.kill(status.ranks[1].pid, signal.SIGKILL)
    again = wait_for_status(job, attempt=1)
    assert again.restarts == 1
    assert not {rank.pid for rank in status.ranks} & {rank.pid for rank in again.ranks}
    assert all(is_alive(rank.pid) for rank in again.ranks)


def test_stop(run, runtime):
    """The first stop grants the grace, which these ranks use up; the second one does not."""
    job = run(program=STUBBORN)
    client.send_request(job.path, StopJobRequest())
    assert all(is_alive(rank.pid) for rank in wait_for_status(job, JobState.STOPPING).ranks)
    client.send_request(job.path, StopJobRequest(now=True))
    assert job.wait() == 130
    job.assert_nothing_left()
    assert list(runtime.iterdir()) == []
    with pytest.raises(JobNotResponding, match="no such file"):
        client.send_request(job.path, StatusQuery())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
def test_another_user_is_refused(run, runtime):
    """The folder keeps other users out; if it is open, the uid of the peer is checked."""
    job = run()
    text = (
        "import os, socket, sys\nos.chdir('/')\ns = socket.socket(socket.AF_UNIX)\n"
        f"os.setgid(65534); os.setuid(65534)\ns.connect({job.path!r})\n"
        f"s.sendall({encode(StatusQuery())!r})\nsys.exit(7 if not s.recv(1) else 8)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr
    for each in [*runtime.parents, runtime, Path(job.path).parent, Path(job.path)]:
        if each.stat().st_uid == 0 and str(each).startswith(str(runtime.parents[1])):
            each.chmod(0o777 if each.is_socket() else 0o755)  # other tests need folders that only we can write
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 7 or "BrokenPipeError" in done.stderr or "ConnectionReset" in done.stderr
    assert wait_for_status(job).state is JobState.RUNNING


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\0\0\0\2{}",
    struct.pack("!I", MAX_REQUEST_BYTES + 1),
    struct.pack("!I", 0xFFFFFFFF) + b"x" * 1000,
    struct.pack("!I", 100) + b"[" * 100,
    encode(StopJobRequest())[:-1] + b"\xff",
    encode(StopJobRequest(now=True)).replace(b"true", b'"no"'),
    struct.pack("!I", 40) + b'{"op": "RankStarted", "rank": 1}        ',
]


def test_invalid_requests_are_dropped(shared_job):
    for sent in (*GARBAGE, encode(StatusQuery()) + encode(StopJobRequest())):
        with call(shared_job.path) as sock:
            sock.sendall(sent)
            try:
                while sock.recv(1 << 16):
                    assert sent not in GARBAGE
            except ConnectionResetError:
                pass  # it was closed before all was read
        assert wait_for_status(shared_job).state is JobState.RUNNING


@pytest.mark.slow
def test_silent_clients_are_disconnected(run, tmp_path):
    job = run(executable=launcher_with_constant(tmp_path, "core.control_socket.server.CONNECTION_TIMEOUT_S", 1.0))
    wait_for_status(job)
    silent = [call(job.path) for _ in range(MAX_CLIENTS)]
    began = time.monotonic()
    assert client.send_request(job.path, StatusQuery(), scaled_timeout(30)).state is JobState.RUNNING
    assert time.monotonic() - began > 0.5
    for each in silent:
        assert each.recv(1) == b""
        each.close()


def test_two_jobs_have_two_control_sockets(run, runtime):
    first, second = run("a"), run("b")
    assert {client.send_request(path, StatusQuery()).run_id for path in list_own_sockets(runtime)} == {"a", "b"}
    client.send_request(first.path, StopJobRequest())
    assert first.wait() == 130
    assert [client.send_request(path, StatusQuery()).run_id for path in list_own_sockets(runtime)] == ["b"]
    assert wait_for_status(second).state is JobState.RUNNING


def test_a_killed_launcher_leaves_a_socket_that_the_next_one_removes(run):
    job = run("a")
    job.signal(signal.SIGKILL)
    job.wait()
    assert Path(job.path).exists()
    with pytest.raises(JobNotResponding, match="connection refused"):
        client.send_request(job.path, StatusQuery())
    other = run("b")
    assert os.listdir(os.path.dirname(other.path)) == [os.path.basename(other.path)]


def test_a_launcher_removes_what_killed_ones_have_left(runtime):
    """It does so itself: there may never be a client."""
    folder = runtime / "ddplaunch"
    folder.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "killed.999999999"))
    (folder / "notes.txt").touch()
    sock, path = socket_dir.open_control_socket("mine")
    assert sock
    sock.close()
    assert {*os.listdir(folder)} == {os.path.basename(path), "notes.txt"}
    socket_dir.remove_socket(path)


def test_a_process_that_has_a_killed_launchers_pid_now_does_not_keep_its_socket(run, runtime):
    """For example the pid 2 of a launcher in another PID namespace."""
    job = run()
    job.signal(signal.SIGKILL)
    job.wait()
    os.rename(job.path, job.path.rpartition(".")[0] + ".1")
    assert list_own_sockets(runtime) == []
    assert not list(runtime.rglob("*.1")), "a client removes what is left"


def test_slow_clients_and_a_suspended_launcher(shared_job):
    with call(shared_job.path) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        sock.sendall(encode(StatusQuery()))
        assert wait_for_status(shared_job).state is JobState.RUNNING
    os.kill(shared_job.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(JobNotResponding, match=r"is suspended \(PID \d+\)"):
            client.send_request(shared_job.path, StatusQuery(), 0.5)
    finally:
        os.kill(shared_job.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("variables", [{"HOME": "/proc/no"}, {"XDG_RUNTIME_DIR": "/proc/no"}, {"TMPDIR": "/proc/no"}])
def test_without_a_home_or_a_runtime_folder(run, monkeypatch, variables):
    job = run(**variables)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert job.path in socket_dir.list_sockets()
    assert wait_for_status(job).state is JobState.RUNNING
    job.signal(signal.SIGTERM)  # it removes its folder of files, which is in /tmp without a TMPDIR
    job.wait()


def in_the_way(kind: str, path: Path) -> None:
    elsewhere = path.parent / "elsewhere"
    if kind == "link":
        elsewhere.mkdir(mode=0o700)
        path.symlink_to(elsewhere)
    elif kind == "file":
        path.write_text("")
    elif kind == "open":
        path.mkdir()
        path.chmod(0o755)
    else:
        path.mkdir(mode=0o700)
        os.chown(path, 65534, 65534)


@pytest.mark.parametrize("kind", ["link", "file", "open", "foreign"])
def test_a_folder_of_another_user_is_not_used(runtime, kind):
    if kind == "foreign" and os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    in_the_way(kind, runtime / "ddplaunch")
    sock, path = socket_dir.open_control_socket("mine")
    assert sock
    with sock:
        assert not path.startswith(str(runtime))
        assert path in socket_dir.list_sockets()
        assert not [each for each in runtime.rglob("*") if each.is_socket()]
    socket_dir.remove_socket(path)


@pytest.mark.parametrize("step", ["check_private_dir", "listen_unix"])
def test_a_folder_that_another_launcher_removes_is_made_again(runtime, monkeypatch, step):
    """It is removed before this step: another launcher has ended since the folder was made or found."""
    calls, original = [], getattr(socket_dir, step)

    def remove_folder_first(path):
        if not calls:
            os.rmdir(runtime / "ddplaunch")
        calls.append(path)
        return original(path)

    monkeypatch.setattr(socket_dir, step, remove_folder_first)
    sock, path = socket_dir.open_control_socket("mine")
    assert sock
    sock.close()
    assert path == f"{runtime}/ddplaunch/mine.{os.getpid()}"
    assert len(calls) == 2
    socket_dir.remove_socket(path)


@pytest.mark.parametrize(("size", "fits"), [(107, True), (108, False)])
def test_the_longest_path_of_a_socket(runtime, monkeypatch, size, fits):
    """Linux has room for 107 bytes (unix(7))."""
    path = f"{runtime}/".ljust(size - len(f"/mine.{os.getpid()}"), "x")
    monkeypatch.setattr(socket_dir, "candidate_dirs", lambda: [path])
    sock, found = socket_dir.open_control_socket("mine")
    assert bool(sock) is fits
    if sock:
        sock.close()
        assert len(found) == size
        socket_dir.remove_socket(found)


def test_without_a_folder_there_is_no_control_socket(monkeypatch):
    monkeypatch.setattr(socket_dir, "candidate_dirs", lambda: ["/proc/ddplaunch"])
    control = ControlSocket(EventLoop(), "x", None)  # type: ignore[arg-type]
    assert control.path is None
    control.close()


def test_a_streaming_request_is_called_once_at_the_end_of_the_job_or_of_its_client(runtime, monkeypatch):
    ended, loop = [], EventLoop()
    monkeypatch.setattr(WaitRequest, "handle", lambda request, context: context.on_job_end(ended.append))
    control = ControlSocket(loop, "mine", SimpleNamespace(report_bug=pytest.fail))
    with call(control.path) as leaving, call(control.path) as staying:
        for each in (leaving, staying):
            each.sendall(encode(WaitRequest()))
        while len(control._on_job_end) < 2:
            loop.run_once()
        assert [timer.callback for timer in control._clients.values()] == [None, None], "no timeout closes it"
        leaving.close()
        while len(control._clients) == 2:
            loop.run_once()
        assert ended == [None]
        control.close(3)
        assert ended == [None, 3]
        assert not loop._selector.get_map(), "nor is a closed descriptor watched"
        assert staying.recv(1) == b""


@pytest.mark.parametrize("code", [3, None])
def test_a_client_that_waits_gets_the_exit_code(runtime, code):
    """A launcher that has failed has none."""
    loop, job = EventLoop(), SimpleNamespace(status=StopReply, report_bug=pytest.fail)
    control = ControlSocket(loop, "mine", job)
    with call(control.path) as sock:
        sock.sendall(encode(WaitRequest()))
        while not control._on_job_end:
            loop.run_once()
        assert WaitRequest().is_streaming, "their number is limited"
        control.close(code)
        data = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert data == encode(StopReply()) + (encode(JobEndReply(code)) if code else b"")


@pytest.mark.parametrize("accepted", [True, False])
def test_a_client_that_connects_as_the_job_ends_learns_that(runtime, accepted):
    """Its connection is closed before its request is read; another ends in the kernel's queue."""
    loop, raised = EventLoop(), list[BaseException]()
    control = ControlSocket(loop, "mine", SimpleNamespace(report_bug=pytest.fail))
    path = control.path

    def ask():
        try:
            next(client.stream_replies(path, WaitRequest()))
        except BaseException as error:
            raised.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    poll = select.poll()
    poll.register(control._socket, select.POLLIN)
    poll.poll()
    if accepted:
        control._accept()
    control.close(0)
    asking.join()
    assert [type(each) for each in raised] == [client.JobEnded]


@pytest.mark.parametrize("reads", [True, False])
def test_a_streaming_client_gets_the_last_output_if_it_reads_it(runtime, monkeypatch, reads):
    """One that does not read it is not waited for without limit."""
    monkeypatch.setattr(server, "DRAIN_TIMEOUT_S", scaled_timeout(30) if reads else 0.05)
    text, loop, received = StopJobRequest(command="x" * (4 << 20)), EventLoop(), []

    def on_end(code):
        context.send(text)
        assert context.unsent_bytes, "the kernel has a part of it"
        if reads:
            reader.start()

    def handle(request, given):
        nonlocal context
        context = given
        context.on_job_end(on_end)

    def read():
        while data := sock.recv(1 << 16):
            received.append(data)

    context, reader = None, threading.Thread(target=read)
    monkeypatch.setattr(WaitRequest, "handle", handle)
    control = ControlSocket(loop, "mine", SimpleNamespace(report_bug=pytest.fail))
    with call(control.path) as sock:
        sock.sendall(encode(WaitRequest()))
        while not context:
            loop.run_once()
        control.close(0)
        if reads:
            reader.join()
            assert b"".join(received) == encode(text)


def test_requests_beyond_the_limit_wait(shared_job):
    """All connections and the kernel's backlog are in use: the next request waits for its turn."""
    others = []
    while len(others) < 500:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        others.append(sock)
        try:
            sock.connect(shared_job.path)
        except BlockingIOError:
            break
    with pytest.raises(JobNotResponding) as raised:
        client.send_request(shared_job.path, StatusQuery(), 0.2)
    assert "did not reply within 0.2 s" in raised.value.message
    assert "try again" in (raised.value.hint or "")
    for sock in others:
        sock.close()
    assert client.send_request(shared_job.path, StatusQuery()).world_size == 2


@pytest.mark.parametrize("is_of_user", [True, False])
def test_only_clients_of_the_user_are_served(runtime, monkeypatch, is_of_user):
    monkeypatch.setattr(server, "peer_uid", lambda sock: os.geteuid() + (not is_of_user))
    loop = EventLoop()
    control = ControlSocket(loop, "mine", SimpleNamespace(report_bug=pytest.fail))
    with call(control.path) as sock:
        loop.run_once()
        assert len(control._clients) == is_of_user
        control.close()
        assert sock.recv(1) == b""


def test_a_request_that_fails_is_reported_and_its_client_closed(runtime, monkeypatch):
    bugs, loop = [], EventLoop()
    monkeypatch.setattr(WaitRequest, "handle", lambda request, context: 1 / 0)
    control = ControlSocket(loop, "mine", SimpleNamespace(report_bug=bugs.append))
    with call(control.path) as sock:
        sock.sendall(encode(WaitRequest()))
        while not bugs:
            loop.run_once()
        assert "the answer to WaitRequest failed" in bugs[0]
        assert control._clients == {}
        control.close()
