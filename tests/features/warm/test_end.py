"""Tests of when a warm zygote ends: its time, its session, lack of memory; nothing is left."""

import fcntl
import itertools
import os
import shlex
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from ddplaunch.core.rank import zygote_channel
from ddplaunch.features.warm import warm_sockets
from ddplaunch.features.warm.warm_process import WarmStart, WarmZygote
from tests.conftest import is_alive, wait_until, wait_until_idle, write_program
from tests.features.warm.conftest import ROOT, SHOWS, WAITS, RunResult, Shell, wait_for_exit, wait_for_text
from tests.scaled_timeouts import scaled_timeout


@pytest.mark.slow
def test_its_time_counts_from_the_end_of_the_last_run(shell: Shell):
    seconds = scaled_timeout(0.8)
    write_program(shell.folder, ".config/ddplaunch.toml", f'[run]\nwarm = "{seconds:.1f}s"\n')
    longer = f"import time\ntime.sleep({1.5 * seconds})\nos.kill(torch.made, 0)\nprint('still there', flush=True)\n"
    write_program(shell.folder, "waits.py", SHOWS + longer)
    done = shell.run(shell.launch("waits.py"))
    assert done.stdout.count("still there") == 2, done.stderr
    wait_for_exit(done.made)
    assert not (shell.runtime / "ddplaunch-warm").exists()


@pytest.mark.slow
def test_without_a_session_leader_it_ends_with_the_outermost_shell(shell: Shell):
    """The outermost shell counts if the session leader has ended or is not visible, as with nohup or nsenter."""
    two_runs = "read go <go; " + 2 * f"{shell.launch('shows.py')}; " + "read go <go"
    made = RunResult(0, after_its_leader(shell, two_runs, says="[1] made", times=2), "").made
    assert shell.list_zygotes() == [made]
    (shell.folder / "go").write_text("on\n")
    wait_for_exit(made)


@pytest.mark.slow
def test_without_a_shell_a_run_starts_cold(shell: Shell):
    after_its_leader(shell, f"read go <go; exec {shell.launch('--log-dir', 'log', 'shows.py')}", says="[1] made")
    assert shell.reasons("log") == ["cannot connect to a warm zygote: the shell that it was started from has ended"]
    assert shell.list_zygotes() == []


def after_its_leader(shell: Shell, line: str, *, says: str, times: int = 1) -> str:
    """Run a line, which waits for ``go``, in a session whose leader has ended; return its output."""
    os.mkfifo(shell.folder / "go")
    out = shell.folder / "background.out"
    done = shell.run(f"setsid -w sh -c {shlex.quote(f'( {line} ) >{out} 2>&1 & echo $!')}")
    shell.started.append(int(done.stdout))
    (shell.folder / "go").write_text("on\n")
    wait_until(lambda: out.read_text().count(says) == times, f"{says} in {out}")
    return out.read_text()


@pytest.mark.ci
def test_it_ends_on_a_signal_and_the_last_one_removes_the_folder(shell: Shell):
    first, second, third = (shell.run(before=f"FOO={number}").made for number in range(3))
    for pid, number in ((first, signal.SIGTERM), (second, signal.SIGHUP)):
        os.kill(pid, number)
        wait_for_exit(pid)
    assert shell.list_zygotes() == [third]
    os.kill(third, signal.SIGKILL)
    wait_for_exit(third)
    assert shell.warm().stderr == "no warm zygotes\n"
    assert not (shell.runtime / "ddplaunch-warm").exists()


@pytest.mark.parametrize("look", [1, 2, 3])
def test_a_folder_removed_between_two_looks_is_created_again(tmp_path, monkeypatch, look):
    """Another launcher creates the folder at the same moment, and the last zygote to end removes it."""
    tmp_path.chmod(0o700)
    folder = str(tmp_path / "warm")
    monkeypatch.setattr(warm_sockets, "socket_dir_candidates", lambda name: [folder])
    mkdir, lstat, looks = os.mkdir, os.lstat, itertools.count(1)

    def create_twice(path, mode):
        monkeypatch.setattr(os, "mkdir", mkdir)
        mkdir(path, mode)
        mkdir(path, mode)

    def look_after_removal(path, **options):
        if path == folder and next(looks) == look:
            with suppress(FileNotFoundError):
                os.rmdir(folder)
        return lstat(path, **options)

    monkeypatch.setattr(os, "mkdir", create_twice)
    monkeypatch.setattr(os, "lstat", look_after_removal)
    assert warm_sockets.warm_socket_dir() == folder


def test_a_folder_removed_while_a_socket_is_created(tmp_path, monkeypatch):
    """Only the lock of the folder that is there now counts: another launcher may have created it."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(warm_sockets, "socket_dir_candidates", lambda name: [str(tmp_path / name)])
    path, others = str(tmp_path / "ddplaunch-warm/socket"), []

    def lock_before_another(fd, how, flock=fcntl.flock):
        monkeypatch.setattr(fcntl, "flock", flock)
        flock(fd, how)
        warm_sockets.remove_empty_dirs()
        others.append(os.open(warm_sockets.warm_socket_dir(), os.O_RDONLY))
        flock(others[0], fcntl.LOCK_EX)

    monkeypatch.setattr(fcntl, "flock", lock_before_another)
    with pytest.raises(BlockingIOError):
        warm_sockets.listen_at(path)
    os.close(others[0])
    with warm_sockets.listen_at(path):
        warm_sockets.connect(path).close()
    warm_sockets.remove_stale(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_signal_to_all_processes_leaves_the_grace_to_the_ranks(shell: Shell):
    """Ranks have their grace after a signal to all processes, as systemd and schedulers send it."""
    write_program(shell.folder, "waits.py", WAITS)
    launcher, out = shell.begin("exec " + shell.launch("waits.py"))
    made = int(wait_for_text(out, "made", 2).split()[2])
    (guardian,) = Path(f"/proc/{made}/task/{made}/children").read_text().split()
    for pid in (made, int(guardian)):
        os.kill(pid, signal.SIGTERM)
    assert shell.list_zygotes() == []
    (shell.folder / "go").touch()
    wait_for_exit(launcher, int(guardian), made)
    assert "ended" not in out.read_text()


@pytest.mark.parametrize("is_ready", [False, True])
def test_killing_a_run_kills_its_own_zygote_or_one_that_still_imports_for_it(tmp_path, is_ready):
    warm, own = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    guardian, its_end = socket.socketpair()
    lifeline, other_end = socket.socketpair()
    path = tmp_path / "folder/socket"
    path.parent.mkdir()
    path.touch()
    try:
        zygote = WarmZygote(guardian, WarmStart(warm.pid, os.pidfd_open(warm.pid), lifeline, str(path)))
        assert zygote.pid == warm.pid
        if is_ready:
            zygote.on_ready(own.pid, os.pidfd_open(own.pid))
            assert other_end.recv(1) == b"", "the warm zygote outlives the launcher"
        zygote.kill()
        assert (own if is_ready else warm).wait() == -signal.SIGKILL
        assert (warm if is_ready else own).poll() is None
        assert path.parent.exists() == is_ready
        zygote_channel.send_message(its_end, {"op": "guardian_exited", "status": 9, "stuck": ["pid 7"]})
        assert (zygote.wait(60), zygote.unkillable) == (9, ["pid 7"])
        assert other_end.recv(1) == its_end.recv(1) == b""
    finally:
        for process in (warm, own):
            process.kill()
            process.wait()


def test_a_guardian_that_does_not_reply_is_not_waited_for_forever():
    own = subprocess.Popen(["sleep", "600"])
    guardian, its_end = socket.socketpair()
    zygote = WarmZygote(guardian, None)
    zygote.on_ready(own.pid, None)
    with its_end:
        assert zygote.wait(0.01) is None
    assert own.wait() == -signal.SIGKILL
    assert zygote.unkillable == ()


@pytest.mark.ci
def test_stop_ends_it_after_the_current_run(shell: Shell):
    write_program(shell.folder, "waits.py", WAITS)
    idle = shell.run(before="FOO=1").made
    launcher, out = shell.begin("exec " + shell.launch("waits.py"))
    made = int(wait_for_text(out, "made", 2).split()[2])
    lines = shell.warm("--stop").stderr.splitlines()
    assert sorted(lines) == sorted([f"{idle} stopped", f"{made} stops when its run ends"])
    assert not is_alive(idle)
    assert is_alive(launcher)
    (shell.folder / "go").touch()
    wait_for_exit(launcher, made)


@pytest.mark.ci
@pytest.mark.skipif(not ROOT, reason="only root may mount")
def test_it_ends_when_little_memory_is_available(tmp_path, shell: Shell):
    """A warm zygote ends when little memory is available (a file stands in for /proc/meminfo)."""
    meminfo = write_program(tmp_path, "meminfo", "MemTotal: 1000 kB\nMemAvailable: 500 kB\n")
    run = f"{shell.launch('--log-dir', 'log', 'shows.py')}; {shell.launch('--log-dir', 'log', 'shows.py')}"
    short = f"printf 'MemTotal: 1000 kB\\nMemAvailable: 90 kB\\n' >{meminfo}"
    script = f"mount --bind {meminfo} /proc/meminfo && {run}; {short}; {shell.launch('--log-dir', 'log', 'shows.py')}"
    if shell.run(f"unshare --mount sh -c 'mount --bind {meminfo} /proc/meminfo'").code:
        pytest.skip("nothing can be mounted here")
    done = shell.run(f"unshare --mount sh -c {shlex.quote(script)}")
    made = [line.split()[2] for line in done.stdout.splitlines()]
    assert len(made) == 6
    assert len(set(made[:4])) == 1
    assert not set(made[:4]) & set(made[4:])
    assert shell.reasons("log") == ["little memory is available"]
    wait_for_exit(int(made[0]))


@pytest.mark.slow
def test_it_does_not_wake_while_idle_and_ends_with_its_shell(shell: Shell):
    made = shell.run().made
    wait_until_idle(made, seconds=1)  # once the run's guardian has ended
    shell.log_out()
    wait_for_exit(made)
