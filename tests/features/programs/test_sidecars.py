"""Tests of sidecars: they run as long as the job, end with it, and do not disturb it."""

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import termios
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, is_alive, wait_until, write_program
from tests.frameworks.launchers import requires
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import LIGHT

pytestmark = pytest.mark.slow

SLEEPER = PROGRAMS / "sleeper.py"
WAITS = """
import os, time
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
"""
"""Returns as soon as there is a file named "go"."""

real = requires("tensorboard")


def beside(*how: str) -> str:
    return shlex.join([sys.executable, str(PROGRAMS / "beside.py"), *how])


NAME = os.path.basename(sys.executable)
"""What the lines of such a one are marked by."""


@pytest.fixture
def waits(tmp_path):
    return write_program(tmp_path, "waits.py", WAITS)


@pytest.fixture
def start_ddplaunch(start_ddplaunch):
    """Start jobs of which nothing is left at the end of a test."""
    jobs = []

    def start(*words, **options):
        jobs.append(start_ddplaunch(*words, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.wait()
        job.assert_nothing_left()


@pytest.fixture
def begin(start_ddplaunch):
    """Start two ranks of a program beside a sidecar of this behaviour; return the job, and the pid of what runs."""

    def start(how: tuple[str, ...], *words, ready: bool = True, **options):
        typed = ("run", *LIGHT, "--nproc", "2", "--sidecar", beside(*how), *words)
        job = start_ddplaunch(*typed, **options)
        pid = sidecar(job)
        if ready:
            job.wait_for("ready", 2)
        return job, pid

    return start


def sidecar(job) -> int:
    """Its pid, once it runs."""
    wait_until(lambda: "] beside " in job.stderr(), "the sidecar")
    found = re.search(r"\] beside (\d+)", job.stderr())
    return int(found[1])


@pytest.mark.parametrize(("nproc", "more"), [(1, ()), (2, LIGHT)], ids=["1", "2"])
@pytest.mark.smoke
def test_it_lives_as_long_as_the_ranks(start_ddplaunch, tmp_path, waits, nproc, more):
    """Its lines are on stderr and marked; stdout is the ranks' alone."""
    job = start_ddplaunch("run", *more, "--nproc", str(nproc), "--sidecar", beside("tidy"), waits)
    pid = sidecar(job)
    job.wait_for("ready", nproc)
    assert is_alive(pid)
    (tmp_path / "go").touch()
    assert job.wait() == 0
    assert not is_alive(pid)
    assert job.stderr().splitlines() == [f"[{NAME}] beside {pid}", f"[{NAME}] tidied up"]
    assert "beside" not in job.stdout()


RESTARTS = """
import os, sys, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", attempt, flush=True)
while not os.path.exists("go" + attempt):
    time.sleep(0.01)
sys.exit(attempt == "0")
"""


def test_it_lives_through_a_restart(begin, tmp_path):
    write_program(tmp_path, "t.py", RESTARTS)
    job, pid = begin((), "--max-restarts", "1", "t.py", ready=False)
    (tmp_path / "go0").touch()
    job.wait_for("attempt 1", 2)
    assert is_alive(pid)
    (tmp_path / "go1").touch()
    assert job.wait() == 0
    assert job.stderr().count("beside") == 1
    assert not is_alive(pid)


def test_it_ends_with_a_job_that_is_stopped(begin):
    """Its children have the grace too; those that ignore SIGTERM are not reported."""
    job, pid = begin(("tidy", "children"), "--grace", f"{scaled_timeout(1):.1f}", SLEEPER)
    job.signal(signal.SIGHUP)
    assert job.wait() == 128 + signal.SIGHUP
    assert not is_alive(pid)
    assert f"[{NAME}] tidied up" in job.stderr()
    assert "did not end" not in job.stderr()


@pytest.mark.parametrize("notice", [None, "TERM"])
def test_a_sidecar_that_ends_by_a_signal_to_all_processes_is_not_reported(begin, notice):
    """A sidecar that ends before the ranks by a signal to all processes, as scancel sends it, is not reported."""
    job, pid = begin((), *(("--preempt-signal", notice) if notice else ()), SLEEPER, "deaf")
    if notice:
        job.signal(signal.SIGTERM)
        wait_until(lambda: "preempt" in job.stderr(), "the notice")
    job.signal(signal.SIGTERM)
    wait_until(lambda: "stopping 2 ranks" in job.stderr(), "the signal")
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not is_alive(pid), "its end")
    job.signal(signal.SIGINT)
    assert job.wait() == 143
    assert "the job continues" not in job.stderr()


def test_it_ends_with_a_preempted_job(begin, tmp_path):
    """The warning, which a scheduler may send to every process, is not for it."""
    asks = "import time\nfrom ddplaunch import runtime\nprint('ready', flush=True)\n"
    write_program(tmp_path, "asks.py", f"{asks}while not runtime.preempted(): time.sleep(0.01)\n")
    job, pid = begin(("tidy",), "asks.py")
    os.kill(pid, signal.SIGUSR2)
    assert is_alive(pid)
    job.signal(signal.SIGUSR2)
    assert job.wait() == 75
    assert f"[{NAME}] tidied up" in job.stderr()
    assert "the job continues" not in job.stderr()


def test_launcher_killed(begin):
    job, _ = begin(("deaf", "children"), "--sidecar", beside(), SLEEPER)
    wait_until(lambda: job.stderr().count("beside") == 2, "both")
    job.signal(signal.SIGKILL)
    job.wait()


def test_zygote_killed(begin):
    """The sweep after the loss of the ranks' zygote spares the sidecars, which end with the job."""
    job, pid = begin(("tidy",), SLEEPER)
    (zygote,) = {parent(rank) for rank in ranks(job)}
    assert zygote != parent(pid)
    os.kill(zygote, signal.SIGKILL)
    assert job.wait() == 137
    assert "the zygote" in job.stderr()
    assert f"[{NAME}] tidied up" in job.stderr()
    assert "the job continues" not in job.stderr()


def ranks(job) -> list[int]:
    """The pids of the ranks that run the sleeper."""
    found = job.find("sleeper.py")
    return [pid for pid in found if pid != job.process.pid]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def test_the_guard_of_sidecars_is_killed(begin, tmp_path, waits):
    job, pid = begin(("children",), waits)
    os.kill(parent(pid), signal.SIGKILL)
    expected = f"{NAME} ended because their guard process was killed; the job continues"
    wait_until(lambda: expected in job.stderr(), "the line")
    (tmp_path / "go").touch()
    assert job.wait() == 0


def test_a_sidecar_that_ignores_sigterm_is_killed_and_reported(begin, tmp_path, waits):
    job, _ = begin(("deaf",), "--grace", "0.5", waits, ready=False)
    (tmp_path / "go").touch()
    assert job.wait() == 0
    assert f"ddplaunch: {NAME} did not end within 0.5 s of SIGTERM, and was killed" in job.stderr()


@pytest.mark.ci
def test_the_result_of_the_job_is_shown_before_sidecars_end(start_ddplaunch, tmp_path):
    """The exit code for the batch script is written before the sidecars end: Slurm may not leave time for more."""
    write_program(tmp_path, "t.py", WAITS + "raise SystemExit(75)\n")
    looks = "trap 'test -e again && echo it is there; exit' TERM; echo beside $$; while :; do sleep 0.1; done"
    words = ("--nproc", "2", "--sidecar", shlex.join(["sh", "-c", looks]), "t.py")
    job = start_ddplaunch("run", *words, env={"DDPLAUNCH_EXIT_FILE": "again"})
    sidecar(job)
    job.wait_for("ready", 2)
    job.signal(signal.SIGUSR2)
    wait_until(lambda: "to save a checkpoint" in job.stderr(), "the warning")
    (tmp_path / "go").touch()
    assert job.wait() == 75
    lines = job.stderr().splitlines()
    assert lines.index("[sh] it is there") > next(i for i, line in enumerate(lines) if "may be run again" in line)


def test_ctrl_c_does_not_wait_for_one_that_ignores_sigterm(begin, tmp_path):
    """The report of an earlier failure is still printed."""
    write_program(tmp_path, "t.py", WAITS + "raise SystemExit(9)\n")
    job, pid = begin(("deaf",), "--log-dir", "logs", "t.py")
    (tmp_path / "go").touch()
    (events,) = tmp_path.glob("logs/*/events.jsonl")
    wait_until(lambda: '"job_ended"' in events.read_text(), "the end of the ranks")
    job.signal(signal.SIGINT)
    assert job.wait() == 9
    assert "exited with code 9" in job.stderr()
    assert not is_alive(pid)


def test_a_sidecar_that_ends_early_is_reported_once(start_ddplaunch, tmp_path, waits):
    """It is reported once, with its last line; the log folder has all that it printed, and when it ended."""
    job = start_ddplaunch(
        *("run", *LIGHT, "--nproc", "2", "--log-dir", "logs", "--sidecar", beside("errs"), "--sidecar", beside("tidy")),
        waits,
    )
    wait_until(lambda: "the job continues" in job.stderr(), "the line")
    wait_until(lambda: f"[{NAME}-2] beside" in job.stderr(), "the other")
    job.wait_for("ready", 2)
    (tmp_path / "go").touch()
    assert job.wait() == 0
    assert f"[{NAME}] nothing to watch" in job.stderr()
    assert f"ddplaunch: {NAME} exited with code 1, the job continues: nothing to watch\n" in job.stderr()
    assert job.stderr().count("the job continues") == 1
    (folder,) = (tmp_path / "logs").iterdir()
    assert re.fullmatch(r"beside \d+\nnothing to watch\n", (folder / f"sidecar-{NAME}.log").read_text())
    assert re.fullmatch(r"beside \d+\ntidied up\n", (folder / f"sidecar-{NAME}-2.log").read_text())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [(each["sidecar"], each["code"]) for each in events if each["event"] == "sidecar_exited"] == [
        (NAME, 1),
        (f"{NAME}-2", 1),
    ]


def test_a_program_that_cannot_be_executed(start_ddplaunch, tmp_path, waits):
    (tmp_path / "program").write_bytes(b"\x7fELF, but not really")
    (tmp_path / "program").chmod(0o755)
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", "--sidecar", "./program", waits)
    wait_until(lambda: "the job continues" in job.stderr(), "the line")
    (tmp_path / "go").touch()
    assert job.wait() == 0
    assert "program exited with code 126, the job continues: ddplaunch: cannot execute ./program" in job.stderr()


@pytest.mark.ci
def test_many_lines_do_not_tear_those_of_the_ranks(start_ddplaunch, tmp_path):
    """Many lines of a sidecar are complete and in order, and do not break lines of the ranks."""
    write_program(tmp_path, "talks.py", "for i in range(20000):\n    print('line', i)\n")
    talks = shlex.join([sys.executable, str(tmp_path / "talks.py")])
    write_program(tmp_path, "t.py", WAITS + "for i in range(20000):\n    print('line', i)\n")
    with (tmp_path / "both").open("wb") as both:
        job = start_ddplaunch("run", *LIGHT, "--nproc", "2", "--sidecar", talks, "t.py", stdout=both, stderr=both)
        wait_until(lambda: "the job continues" in (tmp_path / "both").read_text(), "the end of the sidecar")
        (tmp_path / "go").touch()
        assert job.wait() == 0
    lines = (tmp_path / "both").read_text().splitlines()
    for mark in (f"[{NAME}]", "[0]", "[1]"):
        mine = [line for line in lines if line.startswith(f"{mark} line")]
        assert mine == [f"{mark} line {i}" for i in range(20000)]
    assert len(lines) == 3 * 20000 + 2 + 1  # "ready", and that the sidecar has ended


def test_ctrl_c_in_a_terminal_is_not_for_it(begin):
    """It gets its signal after the ranks have ended."""
    master, slave = pty.openpty()
    job, pid = begin(("tidy",), SLEEPER, "finally", stdin=slave, preexec_fn=lambda: own_terminal(slave))
    os.write(master, b"\x03")
    assert job.wait() == 130
    assert job.stdout().count("cleaned up") == 2
    assert f"[{NAME}] tidied up" in job.stderr()
    assert f"[{NAME}] KeyboardInterrupt" not in job.stderr()
    assert not is_alive(pid)
    os.close(master)
    os.close(slave)


def own_terminal(slave: int) -> None:
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)


@pytest.mark.ci
def test_sidecars_run_on_node_0_only(start_ddplaunch, tmp_path, waits):
    """Other nodes accept the option and start nothing, even if the program is missing."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    write_program(
        tmp_path, "bin/watcher", f"#!{sys.executable}\nimport time\nprint('beside 0', flush=True)\ntime.sleep(99)\n"
    )
    (tmp_path / "bin" / "watcher").chmod(0o755)
    jobs = []
    for node in (0, 1):
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}" if node == 0 else os.environ["PATH"]
        words = ("--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port))
        jobs.append(start_ddplaunch("run", *words, "--nproc", "1", "--sidecar", "watcher", waits, env={"PATH": path}))
    for job in jobs:
        job.wait_for("ready")
    sidecar(jobs[0])
    (tmp_path / "go").touch()
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].stderr() + jobs[1].stderr()
    assert ["beside" in job.stderr() for job in jobs] == [True, False]


def address(job) -> str:
    def announced() -> object:
        assert "the job continues" not in job.stderr(), job.stderr()
        return re.search(r"^ddplaunch: TensorBoard at (\S+)$", job.stderr(), re.MULTILINE)

    wait_until(announced, "the address", 90)
    return re.search(r"TensorBoard at (\S+)", job.stderr())[1]


def answers(url: str, path: str = "") -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url + path, timeout=scaled_timeout(30)) as page:
        return page.read()


@pytest.mark.ci
@real
def test_two_tensorboards_answer_while_their_jobs_live(start_ddplaunch, tmp_path, waits):
    """Each listens on its own loopback address and shows its own runs."""
    jobs, urls = [], []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        jobs.append(start_ddplaunch("run", *LIGHT, "--nproc", "2", "--tensorboard", name, waits))
        urls.append(address(jobs[-1]))
    assert len(set(urls)) == 2
    for url, name in zip(urls, ("one", "two"), strict=True):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        assert b"<title>TensorBoard" in answers(url)
        assert json.loads(answers(url, "data/environment"))["data_location"] == name
    (tmp_path / "go").touch()
    for job, url in zip(jobs, urls, strict=True):
        assert job.wait() == 0
        with pytest.raises(urllib.error.URLError):
            answers(url)
        assert job.stderr() == f"ddplaunch: TensorBoard at {url}\n"


def test_tensorboard_on_a_machine_reached_over_ssh_prints_the_tunnel_command(start_ddplaunch, tmp_path, waits):
    says = "TensorBoard 2.21.0 at http://127.0.0.1:6007/ (Press CTRL+C to quit)"
    write_program(tmp_path, "site/tensorboard/__init__.py", "")
    write_program(tmp_path, "site/tensorboard/main.py", f"import time\nprint({says!r})\ntime.sleep(1000)\n")
    environ = {"PYTHONPATH": str(tmp_path / "site"), "SSH_CONNECTION": "10.0.0.9 40000 10.0.0.1 22"}
    job = start_ddplaunch("run", "--tensorboard", "runs", waits, env=environ)
    assert address(job) == "http://127.0.0.1:6007/"
    (tmp_path / "go").touch()
    assert job.wait() == 0
    way = f"ddplaunch: from your own machine: ssh -N -L 6007:127.0.0.1:6007 {os.uname().nodename}"
    assert job.stderr().splitlines()[1] == way


def test_a_tensorboard_that_fails_shows_why(start_ddplaunch, tmp_path, waits):
    """Its progress messages are not shown, and a module of the user does not shadow its own."""
    write_program(tmp_path, "site/tensorboard/__init__.py", "")
    write_program(
        tmp_path,
        "site/tensorboard/main.py",
        """
        import sys, queue
        print("TensorFlow installation not found", file=sys.stderr)
        print(*sys.argv[1:], file=sys.stderr)
        import no_such_package
        """,
    )
    write_program(tmp_path, "queue.py", "raise SystemExit('the user\\'s')\n")
    job = start_ddplaunch("run", "--tensorboard", "runs", waits, env={"PYTHONPATH": str(tmp_path / "site")})
    wait_until(lambda: "the job continues" in job.stderr(), "the line")
    (tmp_path / "go").touch()
    assert job.wait() == 0
    assert job.stderr().splitlines()[0] == (
        "ddplaunch: tensorboard exited with code 1, the job continues: "
        "ModuleNotFoundError: No module named 'no_such_package'"
    )


LOST_BOTH = """
    import os, signal, time
    from ddplaunch.system.processes import child_processes
    from ddplaunch.core.agent.zygote_client import ZygoteClient, make_zygote_config
    from ddplaunch.core.agent.zygote_process import ZygoteStartSettings
    from ddplaunch.base.event_loop import EventLoop

    class Listener:
        def on_zygote_event(self, event): ...

    start = ZygoteStartSettings(make_zygote_config(), dict(os.environ))
    first, second = (ZygoteClient(EventLoop(), start, listener=Listener()) for _ in range(2))
    for each in (first, second):
        os.kill(each.pid, signal.SIGKILL)
    assert first.close() == signal.SIGKILL
    assert child_processes.kill_descendants(lambda pid: False) == []  # which reaps the second
    second.kill()
    assert second.close() == signal.SIGKILL
    print("well")
"""


def test_both_zygotes_killed_while_one_is_starting(tmp_path):
    """The end of the first sweeps all that is below the launcher; the second leaves nothing to kill."""
    write_program(tmp_path, "lost.py", LOST_BOTH)
    done = subprocess.run([sys.executable, "lost.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("well\n", "")
