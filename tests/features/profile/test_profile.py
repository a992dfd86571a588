"""Tests of ``ddplaunch profile``: where a job spends its time, without slowing it."""

import json
import re
import signal
import subprocess
from pathlib import Path
from statistics import median

import pytest

from tests.conftest import (
    assert_refused,
    clean_environment,
    ddplaunch_command,
    free_port,
    is_alive,
    wait_until,
    write_program,
)
from tests.debugger_fixtures import runtime_dir as runtime_dir
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import EXEC, LIGHT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime_dir")]

HOT = """
import os, sys, threading, time

def hot():
    end = time.monotonic() + 0.06
    while time.monotonic() < end:  # hot
        pass

def step():
    pause = 0.02
    hot()
    time.sleep(pause)  # rest
    if os.environ["RANK"] == "1":
        sorted(range(1_000_000), key=float)  # odd

print("up", flush=True)
while not os.path.exists("enough"):
    step()
print("threads", threading.active_count(), len(os.listdir("/proc/self/task")), flush=True)
"""


def line(program: str, mark: str) -> str:
    """The line that is marked in a program."""
    return f"train.py:{[each.rpartition('# ')[2] for each in program.lstrip().splitlines()].index(mark) + 1}"


@pytest.fixture
def job(start_ddplaunch, tmp_path):
    def begin(*words: str, program: str = HOT, ranks: int = 2):
        write_program(tmp_path, "train.py", program)
        begun = start_ddplaunch("run", "--nproc", str(ranks), *words, "train.py")
        begun.wait_for("up", ranks)
        return begun

    return begin


def rows(page: str) -> dict[str, list[int]]:
    """The lines of a page: mean, least and most time in %."""
    found = re.finditer(r"^(\d+) % +(?:(\d+) to (\d+) %)? +(?:\w+ at )?(train\.py:\d+)", page, re.MULTILINE)
    return {each[4]: [int(number) for number in each.groups()[:3]] for each in found}


def files(folder: Path):
    (trace,), (scope,) = folder.glob("*.trace.json"), folder.glob("*.speedscope.json")
    return json.loads(trace.read_text()), json.loads(scope.read_text())


def nested(trace) -> bool:
    """Whether the slices of each track lie within one another or apart, as viewers want them; in nanoseconds."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for each in trace["traceEvents"]:
        if each["ph"] == "X":
            begin = round(each["ts"] * 1000)
            tracks.setdefault((each["pid"], each["tid"]), []).append((begin, begin + round(each["dur"] * 1000)))
    for slices in tracks.values():
        around: list[int] = []
        for begin, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while around and around[-1] <= begin:
                around.pop()
            if around and end > around[-1]:
                return False
            around.append(end)
    return bool(tracks)


@pytest.mark.ci
def test_a_known_hot_function(job, run_in_fork, tmp_path):
    """Ranks that do not import torch are profiled by signals."""
    begun = job(*LIGHT, ranks=3)
    done = run_in_fork("profile", str(begun.process.pid), "--seconds", "2")
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout)
    assert f"rank 1 differs: {found[line(HOT, 'odd')][2]} % of its time is in step at {line(HOT, 'odd')}" in done.stdout
    assert found[line(HOT, "odd")][1] == 0
    assert found[line(HOT, "hot")][2] > 1.2 * found[line(HOT, "rest")][2]
    trace, scope = files(tmp_path)
    assert {event["name"].partition(" ")[0] for event in trace["traceEvents"]} > {"step", "hot", "process_name"}
    assert nested(trace)
    assert [each["name"] for each in scope["profiles"]] == ["rank 0", "rank 1", "rank 2"]
    for each in scope["profiles"]:  # as speedscope's own reader wants them
        assert len(each["samples"]) == len(each["weights"]) > 1
        assert sum(each["weights"]) == pytest.approx(each["endValue"]) == pytest.approx(2)
        assert {index for sample in each["samples"] for index in sample} <= {*range(len(scope["shared"]["frames"]))}
    (tmp_path / "enough").touch()
    assert begun.wait() == 0, begun.stderr()
    assert begun.stdout().count("threads 1 1") == 3
    begun.assert_nothing_left()


def profiling(tmp_path, begun, seconds: str) -> "subprocess.Popen[str]":
    """A running ``ddplaunch profile``."""
    return subprocess.Popen(
        ddplaunch_command("profile", str(begun.process.pid), "--seconds", seconds),
        cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def heeds(pid: int) -> bool:
    """Whether a rank handles the highest signal: its profile has begun."""
    caught = re.search(r"^SigCgt:\t(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(caught) and bool(int(caught[1], 16) >> 63)


@pytest.mark.ci
def test_a_killed_client_and_a_killed_launcher(job, run_in_fork, tmp_path):
    begun = job(*LIGHT)
    with profiling(tmp_path, begun, "1") as client:
        wait_until(lambda: all(map(heeds, begun.ranks())), "the ranks to begin")
        client.kill()
    assert all(map(is_alive, begun.ranks()))
    wait_until(
        lambda: run_in_fork("profile", str(begun.process.pid), "--seconds", "0.2").returncode == 0,
        "another to be taken",
    )
    assert len([*tmp_path.glob("*.json")]) == 2
    begun.process.kill()
    begun = job(*LIGHT)  # its ranks do not handle the signal of an earlier profile
    with profiling(tmp_path, begun, "30") as client:
        assert client.stderr.readline().startswith("taking a profile of ")
        wait_until(lambda: all(map(heeds, begun.ranks())), "the ranks to begin")
        begun.process.kill()
        _, output = client.communicate(timeout=scaled_timeout(20))
    assert client.returncode == 1
    assert "no rank could be profiled\n  the job ended meanwhile" in output, output
    begun.assert_nothing_left()


def test_ranks_that_are_starting(start_ddplaunch, run_in_fork, tmp_path):
    write_program(tmp_path, "held.py", "import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.01)\n")
    write_program(tmp_path, "train.py", "")
    env = {"PYTHONPATH": str(tmp_path)}
    begun = start_ddplaunch("run", "--run-id", "starting", "--nproc", "2", "--preload", "held", "train.py", env=env)
    wait_until(lambda: "\nstarting " in run_in_fork("ps").stdout, "the job")
    done = run_in_fork("profile", "starting")
    write_program(tmp_path, "go", "")
    assert done.returncode == 1
    assert "\nError: the ranks have not started yet\n  try again in a few seconds" in done.stderr
    assert "no process" not in done.stderr
    assert begun.wait() == 0


OTHERS = """
import os, sys, time
if os.environ["RANK"] == "0":
    print("up", flush=True)
    os.execv("/bin/sleep", ["sleep", "600"])
print("up", flush=True)
while True:
    time.sleep(0.01)
"""


def test_ranks_that_cannot_be_profiled(job, run_in_fork):
    """A rank that has become another program gets no signal, which would kill it."""
    begun = job(*EXEC, program=OTHERS)
    wait_until(lambda: begun.find("sleep 600"), "the other program")
    done = run_in_fork("profile", str(begun.process.pid), "--seconds", "0.5")
    assert done.returncode == 0, done.stderr
    assert "note: no profile of rank 0: it did not respond" in done.stdout
    assert begun.find("sleep 600")
    assert begun.process.poll() is None
    begun.signal(signal.SIGTERM)
    begun.wait()
    begun.assert_nothing_left()


@pytest.mark.ci
def test_py_spy_records_ranks_too(job, run_ddplaunch, run_in_fork, tmp_path):
    """It is the real py-spy, which needs permission to trace processes."""
    begun = job(*LIGHT)
    words = (str(begun.process.pid), "--seconds", "1")
    done = run_ddplaunch("profile", *words, "--py-spy", "0")  # of rank 1, a busy host's second is all in `sorted`
    assert done.returncode == 0, done.stderr
    if "Permission" in done.stdout:
        pytest.skip("py-spy may not trace processes here")
    (path,) = tmp_path.glob("*.rank-0.py-spy.json")
    assert f"py-spy, for speedscope: ./{path.name}" in done.stdout
    assert {"hot", "step"} <= {each["name"] for each in json.loads(path.read_text())["shared"]["frames"]}
    looked = run_ddplaunch("stacks", str(begun.process.pid), "--locals")
    assert re.search(r"rank \d, by py-spy:\n(.*\n)*.*\bpause: 0.02", looked.stdout), looked.stdout
    absent = "--py-spy 0,7: not on this machine: rank 7\n  here: ranks 0, 1"
    for ranks, expected in (("0,7", absent), ("x", "--py-spy x: expected ranks")):
        assert_refused(run_in_fork("profile", *words, "--py-spy", ranks), expected)
    (tmp_path / "enough").touch()
    assert begun.wait() == 0, begun.stderr()
    begun.assert_nothing_left()


def test_refused_arguments(run_in_fork, tmp_path):
    (tmp_path / "file").touch()
    for words, expected in (
        (("--seconds", "0"), "--seconds 0: expected 0.1 to 60"),
        (("--torch", "--seconds", "6"), "--seconds 6: expected 0.1 to 5 with --torch"),
        (("--output", "/nowhere"), "--output /nowhere: there is no such folder, or it cannot be written to"),
        (("--output", "file"), "--output file: there is no such folder, or it cannot be written to"),
        (("no-such-run",), 'no run named "no-such-run"'),
    ):
        assert_refused(run_in_fork("profile", *words), expected)


TRAIN = """
import hashlib, os, sys, time
import torch, torch.distributed as dist

def load(seconds):
    if dist.get_rank() == 1:
        time.sleep(seconds)  # late
    return torch.randn(8, 16)

def train(seconds):
    torch.manual_seed(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
    for step in range(100):
        model(load(seconds)).square().mean().backward()  # wait
        with torch.no_grad():
            for each in model.parameters():
                each -= 0.01 * each.grad
                each.grad = None
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    print("result", hashlib.sha256(weights).hexdigest(), flush=True)

torch.set_num_threads(1)
dist.init_process_group("gloo")
train(0)
print("up", flush=True)
train(0.05)
dist.destroy_process_group()
"""


@pytest.mark.ci
def test_a_late_rank_and_equal_results_over_two_nodes(start_ddplaunch, run_in_fork, tmp_path):
    """A profile of three ranks on two nodes does not change a bit of the result."""
    write_program(tmp_path, "train.py", TRAIN)
    shared = ("--nnodes", "2", "--nproc", "2,1", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    nodes = [
        start_ddplaunch("run", *shared, "--node-rank", number, "--heartbeat-timeout", "2", "train.py",
              env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
        for number in "01"
    ]  # fmt: skip
    nodes[0].wait_for("up", 2)
    done = run_in_fork("profile", str(nodes[1].process.pid), "--seconds", "2", "--torch")
    assert done.returncode == 0, done.stderr
    assert [node.wait() for node in nodes] == [0, 0], [node.stderr() for node in nodes]
    results = re.findall(r"result (\w+)", nodes[0].stdout())
    assert (len(results), len({*results})) == (4, 1)
    late = line(TRAIN, "late")
    assert re.search(rf"rank 1 differs: \d+ % .* load at {late} \(other ranks: 0 %\)", done.stdout), done.stdout
    assert "rank 1 was last in" in done.stdout
    found = rows(done.stdout)
    assert found[late][2] > 50 > found[late][1]
    assert found[line(TRAIN, "wait")][2] > 50
    trace, _ = files(tmp_path)
    assert nested(trace)
    calls = [each for each in trace["traceEvents"] if each.get("cat") == "collective"]
    assert {each["pid"] for each in calls} == {0, 1, 2}
    assert {(each["args"]["group"], each["name"].partition(" ")[0]) for each in calls} >= {("default_pg", "all_reduce")}
    assert "float32[" in calls[0]["args"]["tensors"]
    assert min(each["ts"] for each in trace["traceEvents"] if each["ph"] == "X") >= 0
    for rank in range(3):
        (path,) = tmp_path.glob(f"*.rank-{rank}.torch.json")
        assert json.loads(path.read_text())["distributedInfo"]["rank"] == rank
        of_torch = [each for each in trace["traceEvents"] if each["pid"] == rank and each.get("tid", 0) > 10_000_000]
        assert {"c10d::allreduce_", "aten::linear"} <= {each["name"] for each in of_torch}
        begins = [each["ts"] for each in of_torch if each["name"] == "c10d::allreduce_"]
        ours = [each["ts"] for each in calls if each["pid"] == rank]
        same = [each for each in ours if min(abs(each - begin) for begin in begins) < 1_000]
        assert len(same) > len(ours) / 2  # microseconds: both have the same times
    waited = {rank: median(each["dur"] for each in calls if each["pid"] == rank) for rank in range(3)}
    assert min(waited[0], waited[2]) > 2 * waited[1], "the late rank waits least, in most collectives"


SLOW_START = """
import time, torch

begin = torch.profiler.profile.start

def start(self):
    time.sleep(1.5)
    begin(self)

torch.profiler.profile.start = start
print("up", flush=True)
while True:
    torch.ones(8).sum()
"""
WITHOUT_TORCH = """
import time

print("up", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("program", "expected"), [(SLOW_START, ""), (WITHOUT_TORCH, "of ranks 0, 1: it has not imported torch\n")]
)
def test_the_time_begins_once_all_ranks_have_started_the_profiler_of_torch(
    job, run_in_fork, tmp_path, program, expected
):
    begun = job("--preload", "none", program=program)
    done = run_in_fork("profile", str(begun.process.pid), "--torch", "--seconds", "0.4")
    assert done.returncode == 0, done.stderr
    assert ("no torch.profiler data" in done.stdout) is bool(expected)
    assert expected in done.stdout
    assert len([*tmp_path.glob("*.torch.json")]) == (0 if expected else 2)


OWN = """
import os, torch
from torch.profiler import ProfilerActivity, profile, schedule

print("up", flush=True)
while not os.path.exists("enough"):
    for _ in range(100):
        torch.ones(8).sum()
    with profile(activities=[ProfilerActivity.CPU]) as own:
        torch.ones(8).sum()
    assert any(each.key == "aten::sum" for each in own.key_averages())
    del own
with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=1)) as own:
    torch.ones(8).sum()
    open("prepared" + os.environ["RANK"], "w").close()
    while not os.path.exists("go on"):
        torch.ones(8).sum()
    own.step()
    torch.ones(8).sum()
assert any(each.key == "aten::sum" for each in own.key_averages())
print("fine", flush=True)
"""


@pytest.mark.ci
def test_a_profiler_of_the_programs_own_comes_first(job, run_in_fork, tmp_path, monkeypatch):
    """ddplaunch's profile ends when the program starts torch's profiler, of which there can be one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    begun = job(program=OWN)

    def profile() -> str:
        done = run_in_fork("profile", str(begun.process.pid), "--torch", "--seconds", "0.3")
        assert done.returncode == 0, done.stderr
        return done.stdout

    for _ in range(3):
        profile()
    (tmp_path / "enough").touch()
    wait_until(lambda: len([*tmp_path.glob("prepared?")]) == 2, "the second profiler")
    assert "note: no torch.profiler data of ranks 0, 1: " in profile()
    (tmp_path / "go on").touch()
    assert begun.wait() == 0, begun.stderr()
    assert begun.stdout().count("fine") == 2
    begun.assert_nothing_left()
