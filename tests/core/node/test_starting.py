"""Tests of starting ranks: many at once, and with few descriptors or processes allowed."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import ddplaunch_command, run_command, wait_until, write_program
from tests.constant_override import launcher_with_constant
from tests.start_modes import EXEC, FORKED, LIGHT

PROGRAM = ("--no-python", "--start", "exec")


def events(folder: Path, name: str) -> list[dict[str, object]]:
    """The events of this name in the log folder below ``folder``."""
    lines = [line for file in folder.glob("logs/*/events.jsonl") for line in file.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event["event"] == name]


def limited(number: int, soft: int, hard: int):
    """Run before exec: set a limit."""
    return lambda: resource.setrlimit(number, (soft, hard))


@pytest.fixture
def start_importing(start_ddplaunch, tmp_path):
    """Start a job whose zygote has begun an import, which waits until the pipe "gate" is opened for writing."""

    def start(source, *options, arguments=(), **how):
        os.mkfifo(tmp_path / "gate")
        write_program(tmp_path, "slow.py", "open('importing', 'w').close(); open('gate').read()")
        script = write_program(tmp_path, "train.py", source)
        job = start_ddplaunch("run", "--preload", "slow", *options, script, *arguments, **how)
        wait_until((tmp_path / "importing").exists, "the import")
        return job

    return start


def test_a_start_that_takes_long_shows_what_it_waits_for(start_ddplaunch, tmp_path):
    write_program(tmp_path, "slow.py", "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)")
    script = write_program(tmp_path, "train.py", "")
    sooner = launcher_with_constant(tmp_path, "cli.startup_notice.STARTUP_NOTICE_DELAY_S", 0.2)
    job = start_ddplaunch("run", "--preload", "threading,slow", "--nproc", "2", script, executable=sooner)
    expected = "ddplaunch: starting 2 ranks: importing threading and slow (00:00)\n"
    wait_until(lambda: expected in job.err.read_text(), "the notice")
    (tmp_path / "go").touch()
    assert (job.wait(), job.stdout()) == (0, "")


@pytest.mark.ci
def test_a_thousand_ranks(run_ddplaunch):
    done = run_ddplaunch("run", *PROGRAM, "--nproc", "1000", "/bin/true")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stop_while_the_zygote_imports(start_importing, tmp_path):
    """The job ends at once: no rank is requested yet."""
    later = launcher_with_constant(tmp_path, "core.agent.zygote_client.EXIT_TIMEOUT_S", 600.0)
    job = start_importing("", "--nproc", "300", executable=later)
    job.signal(signal.SIGHUP)
    assert job.wait() == 129
    job.assert_nothing_left()


def test_a_suspended_zygote_does_not_block_the_launcher(start_importing, tmp_path):
    """Requests wait in the launcher while its socket is full. Ranks that start after the stop get SIGTERM at once."""
    options = ("--nproc", "300", "--grace", "600", "--log-dir", "logs")
    job = start_importing("import time; time.sleep(1000)", *options, arguments=["x" * 100_000])
    (tmp_path / "gate").open("w").close()
    wait_until(lambda: events(tmp_path, "rank_started"), "the first rank")
    os.kill(job.zygote(), signal.SIGSTOP)
    job.signal(signal.SIGTERM)
    wait_until(lambda: "stopping" in job.stderr(), "the notice", timeout=2)
    os.kill(job.zygote(), signal.SIGCONT)
    assert job.wait() == 143
    job.assert_nothing_left()


@pytest.mark.parametrize(("options", "of_ranks"), [((*PROGRAM, "sh"), 300), (("--log-dir", "logs", __file__), 700)])
def test_too_few_descriptors_are_refused(tmp_path, options, of_ranks):
    words = ddplaunch_command("run", "--nproc", "100", *options)
    done = run_command(words, tmp_path, preexec_fn=limited(resource.RLIMIT_NOFILE, 64, 256))
    assert done.returncode == 2
    need = int(done.stderr.split("need ")[1].split()[0])
    assert of_ranks < need < of_ranks + 60
    assert done.stderr == (
        f"Error: 100 ranks on this node need {need} open files, and at most 256 are allowed (ulimit -Hn)\n"
        "  raise that limit, or start fewer ranks on each node\n"
    )


def test_ranks_keep_the_limit_that_the_launcher_raised(tmp_path):
    """Ranks of an attempt with a new zygote keep it too."""
    words = ddplaunch_command("run", *PROGRAM, "--nproc", "60", "/bin/sh", "-c", "ulimit -Sn; ulimit -Hn")
    done = run_command(words, tmp_path, preexec_fn=limited(resource.RLIMIT_NOFILE, 64, 500))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(line.split()[1] for line in done.stdout.replace("[", " [").splitlines()) == ["500"] * 60 + ["64"] * 60


@pytest.mark.parametrize("options", [FORKED, EXEC, PROGRAM], ids=["forked", "exec", "program"])
def test_niceness_is_added_to_each_rank(run_ddplaunch, tmp_path, options):
    script = write_program(tmp_path, "train.py", "import os; print(os.nice(0))")
    done = run_ddplaunch("run", "--nproc", "2", "--nice", "7", *options, "nice" if options == PROGRAM else script)
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {os.nice(0) + 7}" for rank in range(2)]


@pytest.mark.slow
def test_requests_that_wait_for_the_zygote_hold_no_descriptors(tmp_path):
    """The launcher raises its limit to what the ranks need. With long arguments the socket takes a few requests."""
    script = write_program(
        tmp_path,
        "train.py",
        """
        import os, time
        open("started." + os.environ["RANK"], "w").close()
        while sum(name.startswith("started.") for name in os.listdir()) < 20:
            time.sleep(0.05)
        """,
    )
    words = ddplaunch_command("run", *LIGHT, "--nproc", "20", script, "x" * 100_000)
    done = run_command(words, tmp_path, preexec_fn=limited(resource.RLIMIT_NOFILE, 64, 4096))
    assert (done.returncode, done.stderr) == (0, "")


def test_descriptors_that_run_out_while_ranks_start(start_importing, tmp_path):
    """The ranks that have started are stopped, and the report names the limit and the only rank that was tried."""
    job = start_importing("import time; time.sleep(1000)", "--nproc", "20", "--log-dir", "logs")
    launcher = psutil.Process(job.process.pid)
    wait_until(lambda: any(each.laddr for each in launcher.net_connections("unix")), "the control socket")
    most = len(os.listdir(f"/proc/{job.process.pid}/fd")) + 10
    resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, (most, most))
    (tmp_path / "gate").open("w").close()
    assert job.wait() == 71
    expected = rf"ddplaunch: rank \d could not be started: too many open files: the limit is {most} \(ulimit -n\); "
    assert re.match(expected + r"\d of 20 ranks ", job.stderr())
    (events,) = tmp_path.glob("logs/*/events.jsonl")
    assert events.read_text().count('"rank_start_failed"') == 1
    job.assert_nothing_left()


HOLDER = """
import glob, json, os, resource, socket, subprocess, sys, time
held, ours = socket.socketpair()
for _ in range(50):
    socket.send_fds(held, [b"x"], [0, 1, 2])
job = subprocess.Popen(sys.argv[2:], preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 500)))
if sys.argv[1] == "release":
    while not any('"zygote_ready"' in open(path).read() for path in glob.glob("logs/*/events.jsonl")):
        time.sleep(0.01)
    held.close(), ours.close()
sys.exit(job.wait())
"""


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root, and setpriv to leave it")
@pytest.mark.parametrize(
    ("how", "code"),
    [pytest.param("release", 0, marks=pytest.mark.slow), pytest.param("keep", 71, marks=pytest.mark.ci)],
)
def test_too_many_descriptors_in_flight(tmp_path, how, code):
    """The kernel counts them for all processes of a user, so the launcher waits for others before it gives up."""
    tmp_path.chmod(0o777)
    other = ["--reuid=54321", "--regid=54321", "--clear-groups"]
    rights = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    words = [
        *ddplaunch_command("run", *LIGHT, "--nproc", "2", "--log-dir", "logs"),
        str(write_program(tmp_path, "train.py", "")),
    ]
    environ = {"TMPDIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    done = run_command(["setpriv", *other, *rights, sys.executable, "-c", HOLDER, how, *words], tmp_path, environ)
    assert done.returncode == code, done.stderr
    if code:
        assert (
            "ddplaunch: rank 0 could not be started: too many descriptors of this user are in flight between "
            "processes: the limit is 64 (ulimit -n); 0 of 2 ranks "
        ) in done.stderr


PIDS = Path("/sys/fs/cgroup/pids")


@pytest.fixture
def pids_group(tmp_path):
    if not (os.getuid() == 0 and PIDS.is_dir() and os.access(PIDS, os.W_OK)):
        pytest.skip("needs root and the pids controller of cgroups v1")
    group = PIDS / f"ddplaunch-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text(), "an empty cgroup")
    group.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize(("most", "restarts"), [(20, 1), (2, 0), (1, 0)])
def test_too_many_processes(tmp_path, pids_group, most, restarts):
    """The job has failed if a rank has started; it is refused if the zygote cannot be started."""
    (pids_group / "pids.max").write_text(str(most))
    words = ddplaunch_command("run", *PROGRAM, "--nproc", "40", "--max-restarts", str(restarts), "/bin/sleep", "1000")
    done = run_command(
        words,
        tmp_path,
        {"TMPDIR": str(tmp_path)},
        preexec_fn=lambda: (pids_group / "cgroup.procs").write_text(str(os.getpid())),
    )
    assert done.returncode == 71, done.stderr
    if most == 1:
        assert done.stderr == (
            "Error: no process can be started: too many processes: the limit of the cgroup is 1 (pids.max)\n"
        )
        return
    expected = (
        f"rank {most - 2} could not be started: too many processes: the limit of the cgroup is {most} (pids.max); "
        f"{most - 2} of 40 ranks had been started here (exit code 71)\n"
    )
    assert done.stderr.count(expected) == 1 + restarts
    assert f"rank {most - 1}" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.ci
@pytest.mark.parametrize("mode", [FORKED, EXEC], ids=["zygote", "exec"])
def test_arguments_and_variables_of_hundreds_of_kilobytes(run_ddplaunch, tmp_path, mode):
    """They arrive as with plain Python: only a single word has a limit, 128 KiB."""
    script = write_program(
        tmp_path, "train.py", "import os, sys; print(len(sys.argv), sys.argv[-1], len(os.environ['LARGE_9']))"
    )
    large = {f"LARGE_{number}": "x" * 100_000 for number in range(10)}
    done = run_ddplaunch("run", *mode, "--nproc", "2", script, *map(str, range(1, 40_001)), env=large)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] 40001 40000 100000", "[1] 40001 40000 100000"]


ODD_ERROR_FILES = {
    "a FIFO": "os.mkfifo(path)",
    "a link to /dev/zero": "os.symlink('/dev/zero', path)",
    "a link to what is not the rank's": "os.symlink('/etc/passwd', path)",
    "a huge file": "os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 1 << 40)",
    "a folder": "os.mkdir(path)",
    "odd fields": """open(path, 'w').write('{"message": {"message": 1, "extraInfo": [2]}}')""",
    "an odd time": """open(path, 'w').write('{"message": {"message": "", "extraInfo": {"time_ns": Infinity}}}')""",
    "a text as the time": """open(path, 'w').write('{"message": {"message": "", "extraInfo": {"time_ns": "x"}}}')""",
    "brackets without end": "open(path, 'w').write('[' * 1_000_000)",
    "messages in messages": """open(path, 'w').write('{"message": ' * 1000 + '1' + '}' * 1000)""",
    "a list as a message": """open(path, 'w').write('{"message": {"message": [1], "extraInfo": []}}')""",
    "an odd stack": """open(path, 'w').write('{"message": {"message": 1, "extraInfo": {"py_callstack": {"a": 1}}}}')""",
    "an odd hint": """open(path, 'w').write('{"message": {"message": "m", "extraInfo": {"hint": 7}}}')""",
    "a null byte": r"open(path, 'w').write('\0')",
    "a text": """open(path, 'w').write('"x"')""",
}


def test_invalid_error_files_are_ignored(run_ddplaunch, tmp_path):
    """Each rank makes one of them, and fails when all are there."""
    script = write_program(
        tmp_path,
        "train.py",
        f"""
        import glob, os, time
        path, rank = os.environ["TORCHELASTIC_ERROR_FILE"], int(os.environ["RANK"])
        exec({list(ODD_ERROR_FILES.values())!r}[rank])
        open(f"made-{{rank}}", "w").close()
        while len(glob.glob("made-*")) < {len(ODD_ERROR_FILES)}:
            time.sleep(0.01)
        raise SystemExit(3)
        """,
    )
    nproc = str(len(ODD_ERROR_FILES))
    done = run_ddplaunch("run", *LIGHT, "--nproc", nproc, script, env={"TMPDIR": str(tmp_path)}, timeout=20)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("ddplaunch-*"))


def test_an_exception_is_not_written_through_a_link(run_ddplaunch, tmp_path):
    script = write_program(
        tmp_path,
        "train.py",
        f"""
        import os
        if os.environ["RANK"] == "0":
            os.symlink({str(tmp_path / "theirs")!r}, os.environ["TORCHELASTIC_ERROR_FILE"])
            raise ValueError("boom")
        """,
    )
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", script, env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 1
    assert "ValueError: boom" in done.stderr
    assert not (tmp_path / "theirs").exists()


def test_the_temporary_folder_cannot_be_guessed(start_importing, tmp_path):
    """It has no name while the zygote imports; later it is private to this user."""
    source = "import time; print('ready', flush=True); time.sleep(1000)"
    job = start_importing(source, "--nproc", "2", "--run-id", "guessed")
    assert not list(job.tmp.iterdir())
    seen = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in job.left())
    assert os.fsencode(job.tmp) not in seen
    guessed = job.tmp / f"ddplaunch-guessed-{job.process.pid}"
    guessed.mkdir()
    (tmp_path / "gate").open("w").close()
    job.wait_for("ready", 2)
    (made,) = [path for path in job.tmp.iterdir() if path != guessed]
    assert made.stat().st_mode & 0o777 == 0o700
    assert not list(guessed.iterdir())
    guessed.rmdir()
    job.signal(signal.SIGKILL)
    job.wait()
    job.assert_nothing_left()


def test_a_log_is_not_written_through_a_link(run_ddplaunch, tmp_path):
    """Others could name any file of this user where they may write."""
    theirs = write_program(tmp_path, "theirs", "whole")
    script = write_program(
        tmp_path,
        "train.py",
        f"""
        import glob, os
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
            (folder,) = glob.glob("logs/*")
            os.symlink({str(theirs)!r}, folder + "/rank-0.attempt-1.log")
            os.mkfifo(folder + "/rank-1.attempt-1.log")
            os.remove(folder + "/plan.json")
            os.symlink({str(theirs)!r}, folder + "/plan.json")
            raise SystemExit(3)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            print("again")
        """,
    )
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", "--log-dir", "logs", "--max-restarts", "1", script)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0] again", "[1] again"]
    assert theirs.read_text() == "whole"
    assert "rank 0 has no log file: Too many levels of symbolic links" in done.stderr
    assert "rank 1 has no log file: No such device or address" in done.stderr
    assert "the log folder is incomplete: plan.json: Too many levels of symbolic links" in done.stderr


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_zygotes_of_ranks_and_sidecars_killed_at_once(start_ddplaunch):
    """The kernel may do that where memory is short."""
    job = start_ddplaunch("run", *PROGRAM, "--sidecar", "sleep 1000", "/bin/sh", "-c", "echo up; exec sleep 1000")
    job.wait_for("up")
    wait_until(lambda: len(children(job.process.pid)) == 2 and all(map(children, children(job.process.pid))), "both")
    for zygote in children(job.process.pid):
        os.kill(zygote, signal.SIGKILL)
    assert job.wait() == 137, job.stderr()
    job.assert_nothing_left()
