"""Tests of ranks that run out of memory, by limits of the kernel, and of reading the files of control groups."""

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.job.restart_policy import is_transient
from ddplaunch.features.memory import memory_alarm
from ddplaunch.features.memory import node as memory
from ddplaunch.features.memory.memory_alarm import MemoryAlarm
from ddplaunch.features.memory.memory_report import MemoryLimit, MemoryPoint, OutOfMemory, describe_growth, explain_oom
from ddplaunch.features.memory.node import KernelLog, OomKill, RankMemory
from ddplaunch.system.devices import cgroups
from tests.conftest import PROGRAMS, wait_until, write_program
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import LIGHT, WARM

NO_GROWTH = "memory use hardly grew"

FAILS = PROGRAMS / "fails.py"
MIB = 1 << 20
NO_PID = 1 << 30  # no pid is as large
V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup/unified")

limited = pytest.mark.skipif(
    not (os.access(V1, os.W_OK) and (V1 / "memory.limit_in_bytes").exists()),
    reason="needs a writable cgroup v1 memory controller to run out of memory",
)
needs_kernel_log = pytest.mark.skipif(
    not os.access("/dev/kmsg", os.R_OK) or os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC,
    reason="needs the kernel's log, and its own numbers of processes",
)
cold = pytest.mark.skipif(WARM, reason="a warm zygote stays in the cgroup, which then cannot be removed")


@pytest.fixture
def group() -> Iterator[Callable[..., Path]]:
    """Make a control group with a limit in MiB, below another of these or not; all are removed."""
    made: list[Path] = []

    def make(limit: int | None, above: Path = V1) -> Path:
        path = above / f"ddplaunch-test-{uuid4()}"
        path.mkdir()
        made.append(path)
        if limit is not None:
            (path / "memory.limit_in_bytes").write_text(str(limit * MIB))
        return path

    yield make
    for path in reversed(made):
        wait_until(lambda path=path: not (path / "cgroup.procs").read_text(), f"{path} is empty", 10)
        path.rmdir()


def joining(path: Path) -> Callable[[], object]:
    """A ``preexec_fn`` that moves a process into a group."""
    return lambda: (path / "cgroup.procs").write_text(str(os.getpid()))


def report(job) -> list[str]:
    """The lines of the failure report."""
    lines = job.stderr().splitlines()
    return lines[next(number for number, line in enumerate(lines) if line.startswith("ddplaunch: rank")) :]


@limited
@cold
def test_the_report_of_a_rank_killed_for_memory_has_the_limit_and_the_usage(group, start_ddplaunch):
    """The limit is that of the parent group."""
    above = group(200)
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", FAILS, "memory", "1", preexec_fn=joining(group(None, above)))
    assert job.wait() == 137
    headline, what, who, *rest = report(job)
    assert headline == "ddplaunch: rank 1 was ended by SIGKILL (out of memory)"
    assert f"{above.name} had used its 200 MiB (memory.limit_in_bytes); oom_kill rose from 0 to 1" in what
    found = re.search(r"rank 1 had (\d+) MiB.* 1 other rank \d+ MiB", who)
    assert 100 <= int(found[1]) <= 220
    advice = next(line for line in rest if "or raise memory.limit_in_bytes" in line)
    assert rest.index(advice) <= 1  # a line about who grew is before it, where the machine let us look in time
    job.assert_nothing_left()


@limited
@cold
@pytest.mark.parametrize("where", ["elsewhere", pytest.param("in the same group", marks=needs_kernel_log)])
def test_the_kill_of_another_process_is_not_confused_with_that_of_a_rank(group, start_ddplaunch, tmp_path, where):
    ours, theirs = group(300), group(32)
    os.mkfifo(tmp_path / "gate")
    program = """
        import os, signal, sys
        if os.environ["RANK"] == "1":
            open(sys.argv[1]).read()
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
        """
    waits = write_program(tmp_path, "waits.py", program)
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", waits, tmp_path / "gate", preexec_fn=joining(ours))
    with open(tmp_path / "gate", "w"):  # it waits for that from now on
        words = [sys.executable, "-c", "bytearray(400 << 20)"]
        into = joining(theirs if where == "elsewhere" else ours)
        assert subprocess.run(words, preexec_fn=into, check=False).returncode == -signal.SIGKILL
    assert job.wait() == 137
    assert report(job)[0] == "ddplaunch: rank 1 was ended by SIGKILL (killed from outside)"
    assert "memory" not in job.stderr()


@limited
@cold
def test_a_killed_child_is_named_with_its_memory(group, start_ddplaunch, tmp_path):
    program = """
        import os, signal

        if os.environ["RANK"] == "0":
            signal.pause()
        child = os.fork()
        if not child:
            held = [bytearray(16 << 20) for _ in range(1000)]
        os.waitpid(child, 0)
        raise RuntimeError(f"DataLoader worker (pid {child}) is killed by signal: Killed. ")
        """
    job = start_ddplaunch(
        "run", *LIGHT, "--nproc", "2", write_program(tmp_path, "t.py", program), preexec_fn=joining(group(200))
    )
    assert job.wait() == 1
    headline, what, who, *_ = report(job)
    child = re.findall(r"pid (\d+)", headline)[0]
    assert re.search(rf"ended (its process {child}, which had 1\d\d MiB|one of its processes): control group", what)
    assert re.search(r"(rank 1 had \d+ MiB, its child processes|the child processes of rank 1 had) 1\d\d MiB", who)
    assert not re.search(r"(?<!of )rank 1 had 1\d\d", who)  # which is the child's
    assert "use fewer DataLoader workers" in job.stderr()


@pytest.mark.ci
@limited
@cold
def test_a_killed_dataloader_worker_is_recognised(group, start_ddplaunch, tmp_path):
    """The exception of the rank differs from run to run: "is killed by signal", or only an EOFError."""
    program = """
        from torch.utils.data import DataLoader, Dataset

        class Growing(Dataset):
            held = []

            def __len__(self):
                return 1000

            def __getitem__(self, index):
                self.held.append(bytearray(16 << 20))
                return index

        for _ in DataLoader(Growing(), batch_size=None, num_workers=1):
            pass
        """
    words = ("--preload", "torch", "--nproc", "1", "--show", "all", write_program(tmp_path, "t.py", program))
    job = start_ddplaunch("run", *words, preexec_fn=joining(group(700)))
    assert job.wait() == 1
    _, what, who, *_ = report(job)
    assert re.search(r"out-of-memory killer ended (its process \d+, which had \d+ MiB|one of its processes): ", what)
    assert re.search(r"rank 0 had \d+ MiB, its child processes \d+ MiB", who)
    assert "use fewer DataLoader workers" in job.stderr()


@limited
def test_a_group_near_its_limit_raises_the_alarm(group, monkeypatch):
    """A pause follows each alarm; a rise during the pause raises the next alarm."""
    monkeypatch.setattr(memory_alarm, "MIN_QUIET_S", 0.02)
    path, loop, woken = group(100), EventLoop(), []
    program = "held = []\nwhile True: held.append(bytearray(int(input()) << 20)); print(flush=True)"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=joining(path)
    )
    alarm = MemoryAlarm(loop, [_group(path, 100)], lambda: woken.append(time.monotonic()))
    over = loop.call_later(scaled_timeout(20), lambda: woken.extend([0, 0, 0]))
    for size in (60, 30):
        before = len(woken)
        child.stdin.write(b"%d\n" % size)
        child.stdin.flush()
        child.stdout.readline()
        while len(woken) == before:
            loop.run_once()
    over.cancel()
    alarm.close()
    child.kill()
    child.communicate()
    assert 0 not in woken


def test_the_pauses_between_alarms_that_follow_at_once_grow(monkeypatch, tmp_path):
    """Page caches fill any limit, and reach it all the time."""
    now, watched, pauses, woken = [0.0], {}, [], []
    monkeypatch.setattr(memory_alarm, "time", SimpleNamespace(monotonic=lambda: now[0]))
    loop = SimpleNamespace(watch_fd=watched.__setitem__, unwatch_fd=watched.pop)
    loop.call_later = lambda seconds, enable: pauses.append((seconds, enable))
    alarm = MemoryAlarm(loop, [], lambda: woken.append(True), str(tmp_path))
    for quiet in (0.5, 1.9, 3.9, 7.9, 14.9, 15.0, 1.1):
        now[0] += quiet
        (ready,) = watched.values()
        ready()
        assert not watched, "it is off in the pause"
        pauses[-1][1]()
    alarm.close()
    assert ([seconds for seconds, _ in pauses], len(woken)) == ([2.0, 4.0, 8.0, 15.0, 15.0, 1.0, 1.0], 7)


def test_a_closed_alarm_leaves_its_descriptor_to_others(tmp_path):
    loop, read = EventLoop(), []
    MemoryAlarm(loop, [], lambda: None, str(tmp_path)).close()
    read_end, write_end = os.pipe()  # the first of them has the number that the alarm's had
    loop.watch_fd(read_end, lambda: read.append(os.read(read_end, 1)))
    os.write(write_end, b"x")
    loop.call_soon(lambda: None)  # so that this round does not wait
    loop.run_once()
    os.close(read_end)
    os.close(write_end)
    assert read == [b"x"]


@pytest.mark.skipif(not os.access(V2, os.W_OK), reason="needs a writable cgroup v2")
def test_a_change_of_the_events_of_version_2_raises_the_alarm(tmp_path):
    """The kernel reports a change of any such file in the same way: no memory controller of version 2 is needed."""
    path = V2 / f"ddplaunch-test-{uuid4()}"
    path.mkdir()
    try:
        (tmp_path / "memory.events").symlink_to(path / "cgroup.events")
        loop, woken = EventLoop(), []
        alarm = MemoryAlarm(loop, [_group(tmp_path, 100, "memory.max")], lambda: woken.append("short"))
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        loop.call_later(scaled_timeout(20), lambda: woken.append("late"))
        (path / "cgroup.procs").write_text(str(child.pid))
        while not woken:
            loop.run_once()
        child.communicate(b"\n")
        alarm.close()
        assert woken == ["short"]
    finally:
        path.rmdir()


def test_folders_of_control_groups(tmp_path):
    """Version 2 may be mounted together with version 1; other lines are ignored."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    write_program(tmp_path, "proc/self/cgroup", "4:cpu,memory:/a/b\n3:pids:/a\n\nodd\n0::/x\n")
    found = [
        each.removeprefix(f"{tmp_path}/sys/fs/cgroup") for each in cgroups.list_cgroup_dirs("memory", str(tmp_path))
    ]
    assert found == ["/memory/a/b", "/memory/a", "/memory", "/x", "", "/unified/x", "/unified"]


def _group(path: Path, limit: int, setting: str = "memory.limit_in_bytes") -> cgroups.Cgroup:
    return cgroups.Cgroup(str(path), path.name, setting, limit * MIB, 0, 0)


def tree(root: Path, groups: str, **files: str) -> str:
    """Make /proc and /sys below ``root``; in names of files ``__`` is for a slash."""
    for name, text in {
        "proc/self/cgroup": groups,
        **{name.replace("__", "/"): text for name, text in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


@pytest.fixture
def rank_memory() -> Iterator[Callable[..., RankMemory]]:
    """Make a RankMemory that reads below a root; it is closed at the end."""
    made: list[RankMemory] = []

    def make(root: str, ranks: Callable[[], dict[int, int]] = dict) -> RankMemory:
        made.append(RankMemory(EventLoop(), ranks, root))
        return made[-1]

    yield make
    for each in made:
        each.close()


def events(root: Path, path: str, **counts: int) -> None:
    (root / path).write_text("".join(f"{name} {count}\n" for name, count in counts.items()))


def test_version_2_with_a_limit_in_a_parent_group(rank_memory, tmp_path):
    """oom_kill rises in the group of the process, and oom in the group of the limit."""
    job, step = "sys/fs/cgroup/slurm/job_42", "sys/fs/cgroup/slurm/job_42/step_0"
    root = tree(tmp_path, "0::/slurm/job_42/step_0\n", **{
        f"{step}/memory.max": "max\n",
        f"{step}/memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 1\n",
        f"{step}/memory.stat": "anon 1000\nfile 5242880\nshmem 4194304\n",
        f"{job}/memory.max": str(64 << 30),
        f"{job}/memory.events": "max 7\noom 0\noom_kill 1\n",
        f"{job}/memory.events.local": "max 7\noom 0\noom_kill 0\n",
    })  # fmt: skip
    memory = rank_memory(root)
    assert memory.explain_kill(signal.SIGKILL, "", 1, NO_PID, 60 << 30) is None  # that one was before
    events(tmp_path, f"{step}/memory.events", oom=0, oom_kill=2)
    events(tmp_path, f"{job}/memory.events.local", oom=1, oom_kill=0)
    assert (memory.explain_kill(signal.SIGKILL, "", 1, NO_PID, 60 << 30) or "").splitlines() == [
        "the kernel's out-of-memory killer ended it: control group /slurm/job_42 had used its 64.0 GiB (memory.max); "
        "oom_kill rose from 1 to 2",
        "rank 1 had 60.0 GiB, shared memory 4 MiB, page cache 1 MiB",
        "reduce host memory: log loss.item(), avoid growing lists, use smaller batches; "
        "or ask for more memory (sbatch --mem)",
    ]
    assert memory.explain_kill(signal.SIGTERM, "", 1, NO_PID, 0) is None
    (tmp_path / step / "memory.max").write_text(str(96 << 30))  # was not reached
    events(tmp_path, f"{step}/memory.events", oom=0, oom_kill=3)
    events(tmp_path, f"{job}/memory.events.local", oom=2, oom_kill=0)
    assert "/slurm/job_42 had used its 64.0 GiB" in (memory.explain_kill(signal.SIGKILL, "", 1, NO_PID, 1) or "")


def test_version_1_in_a_container(rank_memory, tmp_path):
    top = "sys/fs/cgroup/memory"
    root = tree(tmp_path, "4:memory:/docker/abc\n0::/\n", **{
        f"{top}/memory.limit_in_bytes": str(8 << 30),
        f"{top}/memory.failcnt": "3\n",
        f"{top}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        f"{top}/memory.stat": "cache 1\ntotal_cache 3145728\ntotal_shmem 1048576\n",
        "proc/vmstat": "oom_kill 9\n",
    })  # fmt: skip
    memory = rank_memory(root)
    events(tmp_path, "proc/vmstat", oom_kill=10)
    assert memory.explain_kill(signal.SIGKILL, "", 0, NO_PID, 1) is None  # on the machine, but not of ours
    events(tmp_path, f"{top}/memory.oom_control", oom_kill=1)
    (tmp_path / top / "memory.failcnt").write_text("80\n")
    what, who, _ = (memory.explain_kill(signal.SIGKILL, "", 0, NO_PID, 5 << 30) or "").splitlines()
    assert "control group / had used its 8.0 GiB (memory.limit_in_bytes); oom_kill rose from 0 to 1" in what
    assert who == "rank 0 had 5.0 GiB, shared memory 1 MiB, page cache 2 MiB"


def test_kills_in_the_kernel_log(tmp_path, monkeypatch):
    """The lines are those of Linux 6.18, with and without a group."""
    monkeypatch.setattr(memory, "_INIT_PID_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino)
    log = tree(tmp_path, "", **{"dev/kmsg": "Killed process 1 (old) total-vm:1kB, anon-rss:1kB, file-rss:1kB, "})
    kernel = KernelLog(log)
    for line in (
        "6,2318,717,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/job,"
        "task_memcg=/job/step,task=python,pid=42,uid=0",
        "3,2319,718,-;Memory cgroup out of memory: Killed process 42 (a) b) total-vm:9kB, anon-rss:2048kB, "
        "file-rss:7kB, shmem-rss:1024kB, UID:0 pgtables:460kB oom_score_adj:0",
        "6,2320,719,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
        "task_memcg=/job/step,task=python,pid=43,uid=0",
        "3,2321,720,-;Out of memory: Killed process 43 (b) total-vm:9kB, anon-rss:1kB, file-rss:7kB, shmem-rss:0kB, ",
    ):
        with open(tmp_path / "dev" / "kmsg", "a") as file:
            file.write(line)
        kernel.read_kills()
    assert kernel.read_kills() == {
        42: OomKill(2 << 20, 1 << 20, "/job/step", "/job"),
        43: OomKill(1024, 0, "/job/step", None),
    }
    kernel.close()


def test_the_kernel_log_is_ignored_in_a_container(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_INIT_PID_NAMESPACE", 0)
    log = tree(tmp_path, "", **{"dev/kmsg": ""})
    kernel = KernelLog(log)
    (tmp_path / "dev" / "kmsg").write_text(
        "Killed process 1 (a) total-vm:9kB, anon-rss:1kB, file-rss:7kB, shmem-rss:0kB, "
    )
    assert (kernel.read_kills(), kernel.is_complete) == ({}, False)


LOADER = '  File "torch/utils/data/dataloader.py"'


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (f'{LOADER}, line 1\n  File "connection.py", line 2\nEOFError\n', True),
        (f"{LOADER}, line 1\nRuntimeError: DataLoader worker (pid(s) 7) exited unexp", False),
        (f"{LOADER}\nDataLoader worker (pid(s) 7, 8) exited unexpectedly", True),
        (f"{LOADER}\nValueError: Caught ValueError in DataLoader worker process 0.", False),
        ('  File "connection.py", line 2\nEOFError\n', False),
        ("mine is killed by signal: Killed (pid 1,2 , 99999999999)", True),
    ],
)
def test_exceptions_that_may_be_a_killed_worker(rank_memory, tmp_path, text, lost):
    root = tree(tmp_path, "0::/\n", **{"proc/vmstat": "oom_kill 3\n"})
    memory = rank_memory(root)
    events(tmp_path, "proc/vmstat", oom_kill=4)
    assert bool(memory.explain_kill(0, text, 0, NO_PID, 0)) is lost


def test_kills_on_the_machine_count_without_a_control_group(rank_memory, tmp_path):
    root = tree(tmp_path, "0::/\n", **{"proc/vmstat": "oom_kill 3\n", "proc/meminfo": "MemTotal: 16777216 kB\n"})
    memory = rank_memory(root)
    assert memory.explain_kill(signal.SIGKILL, "", 0, NO_PID, 1) is None
    events(tmp_path, "proc/vmstat", oom_kill=4)
    found = memory.explain_kill(signal.SIGKILL, "", 0, NO_PID, 5 << 30) or ""
    assert found.startswith("the kernel's out-of-memory killer was active on this machine: probably out of memory")
    assert "start fewer ranks on it" in found
    assert is_transient(RankFailure(0, 0, "h", 1, 0, 1, None, "EOFError", None, 1.0, found))
    killed = RankFailure(0, 0, "h", 1, 0, None, signal.SIGKILL, None, None, 1.0, found)
    assert killed.reason == "was ended by SIGKILL (probably out of memory)"


def test_proportional_sizes_are_read_by_one_thread(rank_memory, tmp_path, monkeypatch):
    """They are not read of ranks with much memory: alarms are frequent, as page caches fill limits."""
    asked, answer, held = [], threading.Event(), [1]

    def anonymous(pid: int, file: str, field: str) -> int:
        if file == "smaps_rollup":
            asked.append(pid)
            answer.wait(scaled_timeout(20))
        return held[0]

    def refuse_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(memory, "_read_counter_bytes", anonymous)
    usage = rank_memory(tree(tmp_path, "0::/\n"), lambda: {0: os.getsid(0)})
    usage._on_alarm()
    usage._on_alarm()
    assert len(asked) == 1
    answer.set()
    wait_until(lambda: not usage._pss_lock.locked(), "the reader")
    with monkeypatch.context() as without_threads:
        without_threads.setattr(memory._thread, "start_new_thread", refuse_thread)
        usage._on_alarm()
    for held[0], is_read in ((1, True), (1, True), (64 << 30, False)):
        asked.clear()
        usage._on_alarm()
        assert bool(asked) is is_read


def test_without_a_free_descriptor_there_is_no_sample_and_no_exception(rank_memory, tmp_path):
    usage = rank_memory(tree(tmp_path, "0::/\n"), lambda: {0: os.getsid(0)})
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        usage._on_alarm()
        assert usage.explain_kill(signal.SIGKILL, "", 0, NO_PID, 1) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def point(moment, own, children=0, shared=0, cache=0):
    return MemoryPoint(moment, own << 30, children << 30, shared << 30, cache << 30)


@pytest.mark.parametrize(
    ("points", "grew", "advice"),
    [
        ([point(0, 1, 2), point(600, 1, 30)], "its child processes grew from 2.0 GiB to 30.0 GiB", "fewer DataLoader"),
        ([point(0, 1, 2, 1), point(60, 1, 2, 9)], "shared memory grew from 1.0 GiB to 9.0 GiB", "prefetch_factor"),
        ([point(0, 1), point(60, 9, 0, 0, 8)], "rank 3 grew from 1.0 GiB to 9.0 GiB, page cache grew", "reduce host"),
        ([point(0, 40, 2), point(30, 40, 2)], None, "reduce host"),
        ([point(0, 40, 2, 1, 1), point(30, 41, 2, 1, 1)], NO_GROWTH, "reduce host"),
        ([point(0, 2, 60), point(30, 3, 60)], NO_GROWTH, "fewer DataLoader"),
        ([point(0, 90), point(700, 1, 1), point(900, 1, 5)], "in the last 3m20s its child", "fewer DataLoader"),
        ([point(0, 2, 40)], None, "fewer DataLoader"),
        ([point(0, 90), point(900, 1, 5)], None, "fewer DataLoader"),
        ([], None, "reduce host"),
    ],
)
def test_the_report_shows_growth_and_advice(points, grew, advice):
    lines = explain_oom(OutOfMemory(3, MemoryLimit(64 << 30, "/kubepods/pod7", "memory.max"), 0, 1), points)
    assert advice in lines[-1]
    assert lines[-1].endswith("; or raise resources.limits.memory of the pod")
    assert len(lines) == 2 + bool(points) + bool(grew)
    assert (grew or "") in describe_growth(3, points)


def test_older_points_show_growth_over_minutes():
    """They are used only if they show growth: pages that forks copy appear in the growth of the children alone."""
    shortage = OutOfMemory(3, MemoryLimit(64 << 30), 0, 1, others=2, held=3 << 30)
    near = [point(590, 1, 20), point(600, 1, 22)]
    found = explain_oom(shortage, near, [point(60, 1, 4), point(600, 1, 30)])
    assert found[1] == "rank 3 had 1.0 GiB, its child processes 22.0 GiB, 2 other ranks 3.0 GiB"
    assert found[2] == "in the last 9m00s its child processes grew from 4.0 GiB to 30.0 GiB"
    for longer in ([point(60, 1, 30), point(600, 1, 30)], [point(565, 1, 4), point(600, 1, 30)]):
        found = explain_oom(shortage, near, longer)
        assert found[2] == "in the last 10s its child processes grew from 20.0 GiB to 22.0 GiB"
    found = explain_oom(shortage, [point(600, 1)], [point(60, 1, 4), point(600, 1, 30)])
    assert found[1:3] == (
        "rank 3 had 1.0 GiB, its child processes 30.0 GiB, 2 other ranks 3.0 GiB",
        "in the last 9m00s its child processes grew from 4.0 GiB to 30.0 GiB",
    )


def test_a_sample_has_the_memory_of_a_rank_and_its_children(rank_memory, tmp_path):
    root = tree(tmp_path, "0::/\n", **{"proc/vmstat": "oom_kill 3\n", "proc/meminfo": "MemTotal: 16777216 kB\n"})
    program = (
        "import os, sys\nif os.fork():\n os.wait()\nfor _ in sys.stdin: held = bytearray(90 << 20); print(flush=True)"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    memory = rank_memory(root, lambda: {0: rank.pid})
    wait_until(lambda: Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text(), "its child")
    memory.sample()
    rank.stdin.write(b"\n")
    rank.stdin.flush()
    rank.stdout.readline()
    memory.sample()
    events(tmp_path, "proc/vmstat", oom_kill=4)
    found = memory.explain_kill(signal.SIGKILL, "", 0, rank.pid, 1 << 20) or ""
    rank.communicate()
    assert re.search(r"in the last \S+ its child processes grew from \d+ MiB to (9|1\d)\d MiB", found), found
