"""Tests of ``ddplaunch.launch`` called by programs: results, errors, output."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddplaunch.features.python import launched_job
from tests.conftest import clean_environment, run_command, wait_until, write_program
from tests.features.python.conftest import HEAD, Python
from tests.reference.keywords import FILE, render_keywords
from tests.scaled_timeouts import scaled_timeout

RETURNS = """
class Point:
    def __init__(self, x):
        self.x = x

def double(factor, point):
    print("at", rank())
    return Point(factor * point.x + rank())

if __name__ == "__main__":
    found = launch(double, 2, Point(10), nproc=3)
    assert all(type(each) is Point for each in found)  # also where the class is the program's own
    print([each.x for each in found])
    print(launch(partial(double, point=Point(1)), 3, nproc=1)[0].x, launch(lambda: print("on", end=" ") or 5))
"""


@pytest.mark.ci
@pytest.mark.smoke
def test_results_are_in_order_of_ranks(python: Python):
    lines = python(RETURNS).splitlines()
    assert sorted(lines) == sorted([*(f"[{rank}] at {rank}" for rank in range(3)), "[20, 21, 22]", "at 0", "on 3 [5]"])


@pytest.mark.ci
def test_tensors_are_returned_completely(python: Python):
    body = """
def make(given):
    import torch
    if rank() == 1:
        os.symlink(f"/proc/{os.getpid()}", "other")
    else:
        while not os.path.islink("other") or os.path.exists("other"):  # until the other rank has ended
            time.sleep(0.01)
    assert float(given.sum()) == given.numel()
    linear = torch.nn.Linear(600, 600)
    return [given * (rank() + 2), torch.arange(3), linear, linear.weight.detach().t()]

if __name__ == "__main__":
    import torch
    for big, small, linear, turned in launch(make, torch.ones(1 << 20), nproc=2):
        assert torch.equal(linear.weight.t(), turned) and linear.weight.requires_grad
        big += 1  # it is ours
        print(float(big[0]), small.tolist(), big.shape[0])
"""
    assert python(body) == f"3.0 [0, 1, 2] {1 << 20}\n4.0 [0, 1, 2] {1 << 20}\n"


FAILS = """
def fails():
    raise ValueError("no luck")

def odd():
    raise type("Odd", (Exception,), {"__init__": lambda self, a, b: Exception.__init__(self, a)})("x", 2)

def in_rank_1(how):
    return how() if rank() == 1 else 1

if __name__ == "__main__":
    killed, exits, ends = partial(signal.raise_signal, 9), partial(sys.exit, 3), partial(sys.exit, 0)
    for how in (fails, killed, exits, threading.Lock, odd, ends):
        try:
            launch(in_rank_1, how, nproc=2, preload="threading")
        except RankFailed as error:
            cause = error.__cause__
            raised = "" if type(cause).__name__ == "RankTraceback" else repr(cause)
            last = type(cause if not raised else getattr(cause, "__cause__", None)).__name__
            print(error.rank, error.exit_code, error.signal, raised, last, "|", str(error).partition(" (")[0])
            assert error.report.startswith("ddplaunch: " + str(error)), error.report
            assert "call_loop.py" not in error.report and "launch.py" not in error.report, error.report
        except LaunchError as error:
            print(error)
"""


@pytest.mark.ci
def test_a_rank_that_fails(python: Python):
    unfit = "rank 1 returned lock, which cannot be pickled: cannot pickle '_thread.lock' object"
    assert python(FAILS).splitlines() == [
        "1 1 None ValueError('no luck') RankTraceback | rank 1 failed with ValueError: no luck",
        "1 137 9 None NoneType | rank 1 was ended by SIGKILL",
        "1 3 None None NoneType | rank 1 exited with code 3",
        f'1 1 None TypeError("{unfit}") RankTraceback | rank 1 failed with TypeError: {unfit}',
        "1 1 None  RankTraceback | rank 1 failed with Odd: x",
        "rank 1 ended before the function returned",
    ]


RESISTS = """
def fails(number):
    import builtins
    class Exits(Exception):
        def __str__(self):
            raise SystemExit(44)
    class Meta(type):
        __name__ = property(lambda cls: 1 / 0)
    class Broken(Exception, metaclass=Meta):
        def __getattribute__(self, name):
            raise ZeroDivisionError
    class Causes(Exception):
        __cause__ = property(lambda error: 1 / 0)
    builtins.open = os.open = os.rename = None
    sys.stderr.write("a bar without an end: 50 %")
    if number == 3:
        sys.stderr.flush()
        os._exit(3)
    raise (Exits, Broken, Causes)[number]("no luck")

if __name__ == "__main__":
    for number in range(4):
        try:
            launch(fails, number, nproc=1)
        except RankFailed as error:
            print(error)
"""


@pytest.mark.ci
def test_a_failure_is_raised_whatever_a_program_does_to_its_exception_and_its_output(python: Python):
    assert python(RESISTS).splitlines() == [
        "rank 0 failed with Exits: <exception str() failed> (exit code 1)",
        "rank 0 failed with Broken: no luck (exit code 1)",
        "rank 0 failed with Causes: no luck (exit code 1)",
        "rank 0 exited with code 3",
    ]


INJECTED = """
import functools

def train(lr, rank, world_size, device: str, *, local_rank=None):
    return lr, rank, world_size, device, local_rank

class Model:
    def fit(self, gpu, steps=3):
        return gpu, steps

def record(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

@record
def spawned(rank, world_size, *rest):
    return rank, world_size, rest

def adds(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function("added", *args)
    return wrapper

@adds
def given(model, x):
    return model, x

if __name__ == "__main__":
    with Session(nproc=2, preload="threading") as session:
        print(session.run(train, 0.1)[1])
        print(session.run(partial(train, rank=7), 0.2)[1])
        print(session.run(Model().fit)[1], session.run(Model().fit, 5)[1])
        print(session.run(spawned)[1], session.run(spawned, "a", "b")[1])
        print(session.run(given, 1)[1], session.run(max, 1, 2)[1], session.run(lambda x=1, rank=0, /: (rank, x))[1])
"""


def test_parameters_get_rank_values_by_name(python: Python):
    """Parameters get values by name as with ``ddplaunch run``; positional arguments fill the others."""
    assert python(INJECTED).splitlines() == [
        "(0.1, 1, 2, 'cpu', 1)",
        "(0.2, 7, 2, 'cpu', 1)",
        "(1, 3) (1, 5)",
        "(1, 2, ()) (1, 2, ('a', 'b'))",
        "('added', 1) 2 (1, 1)",
    ]


def test_a_function_of_a_library_gets_no_values_that_it_does_not_need(python: Python, tmp_path: Path):
    """As numpy.ones(n, device=None). It gets all if it cannot be called without, as a program that is installed."""
    ones = "def ones(shape, *, gpu=None):\n    return shape, gpu\n"
    worker = "def worker(rank, world_size, gpu=None):\n    return rank, world_size, gpu\n"
    write_program(tmp_path, "site-packages/library.py", ones + worker)
    body = """
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "site-packages"))
import library

def own(shape, *, gpu=None):
    return shape, gpu

if __name__ == "__main__":
    with Session(nproc=2, preload="threading") as session:
        print(session.run(partial(library.ones, 3))[1], session.run(library.ones, 4)[1])
        print(session.run(library.worker)[1], session.run(library.worker, 5, 6)[1])
        print(session.run(partial(own, 3))[1][1])
"""
    lines = python(body).splitlines()
    assert lines == ["(3, None) (4, None)", "(1, 2, 1) (5, 6, None)", "1"]


@pytest.mark.ci
def test_arrays_are_mapped_files(python: Python):
    body = """
import numpy

def change(array, fixed):
    array += rank()
    assert not fixed.flags.writeable and fixed.flags.f_contiguous
    return array

if __name__ == "__main__":
    big = numpy.ones((1 << 10, 1 << 9))
    fixed = numpy.asfortranarray(big)
    fixed.flags.writeable = False
    with Session(nproc=2, preload="numpy") as session:
        found = session.run(change, big, fixed)
        found[0] += 1  # it is the caller's
        print([float(each.sum()) / big.size for each in (big, *found)])
        print(sorted(os.listdir(session._ranks._job.folder)))
"""
    assert python(body).splitlines() == ["[1.0, 2.0, 2.0]", "['__pycache__', 'calls', 'launch.py', 'path']"]


REFUSED = {
    "launch(rank, nproc='x')": "UsageError --nproc x: expected a number, a list like 8,8,4, or auto, gpu, cpu",
    "launch(rank, nprocs=2)": "TypeError launch() got an unexpected keyword argument 'nprocs'",
    "launch(rank, dry_run=True)": "UsageError dry_run does not work from Python: ddplaunch run --dry-run shows a plan",
    "launch(lambda lock: 1, threading.Lock())": "UnpicklableError argument 1 (lock) cannot be sent to the ranks: "
    "cannot pickle '_thread.lock' object",
    "launch('x')": "UsageError expected a function, not str 'x'",
    "launch(launch_async)": "UsageError launch_async is a coroutine function",
    "launch(train)": "UsageError train(): missing a required argument: 'lr'",
    "launch(train, 0.1, 0, 2)": "UsageError train(): too many positional arguments",
    "launch(partial(train, rank=3), 1, 2)": "UsageError partial(): too many positional arguments",
    "Session(hosts='a,b')": "UsageError hosts does not work with Session: its ranks are on this machine",
}


def test_refused(python: Python):
    body = f"""
def train(rank, lr, world_size):
    pass

for call in {list(REFUSED)!r}:
    try:
        eval(call)
    except Exception as error:
        print(type(error).__name__, error)
"""
    assert python(body).splitlines() == [*REFUSED.values()]


def test_hosts_that_cannot_be_reached_are_named(python: Python, tmp_path: Path):
    """The error of a job over SSH has a line for each host, and a traceback shows the hint of an error."""
    write_program(tmp_path, "bin/ssh", '#!/bin/sh\n[ "$1" = -G ] || { echo "no route to it" >&2; exit 255; }\n').chmod(
        0o755
    )
    body = """
import traceback

for keywords in ({"hosts": "n1:1,n2:1"}, {"nproc": 0}):
    try:
        launch(rank, **keywords)
    except LaunchError as error:
        print(*traceback.format_exception_only(error), sep="", end="")
"""
    found = python(body, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    expected = [
        "ddplaunch.base.errors.LaunchError: 2 of 2 hosts cannot run the job; nothing was started",
        "  n1: no route to it",
        "  n2: no route to it",
        "ddplaunch.base.errors.UsageError: --nproc 0: --nproc must be at least 1",
        *["--nproc 1"] * (sys.version_info >= (3, 11)),
    ]
    assert found.splitlines() == expected


@pytest.mark.ci
def test_a_hang_is_explained(python: Python):
    body = """
def hang():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    if rank() == 1:
        time.sleep(1000)
    dist.barrier()

if __name__ == "__main__":
    for how in ({"timeout": float(os.environ["SECONDS_TO_START"])}, {"stall_timeout": 2}):
        try:
            launch(hang, nproc=2, **how)
        except LaunchError as error:
            print(error)
    with Session(nproc=2, restart=True) as session:
        session.run(rank)
        try:
            session.run(hang, timeout=3)
        except LaunchError as error:
            print(error)
        print(session.run(rank))
"""
    first, second, called, again = python(body, SECONDS_TO_START=str(scaled_timeout(4))).splitlines()
    assert "rank 0 waits in barrier #1 of default_pg, entered at program.py:13" in first
    assert "rank 1 has not entered it: hang at program.py:12" in first
    assert "rank 1 did not enter barrier #1, which 1 rank waited for: hang at program.py:12" in second
    assert called.startswith("the call timed out: rank 0 waits in barrier #1 of default_pg")
    assert again == "[0, 1]"


@pytest.mark.ci
def test_a_stream_that_raises(python: Python):
    """An exception of the stream ``output`` ends the ranks and reaches the caller; what it cannot encode is escaped."""
    body = """
import io

class Full(io.StringIO):
    def write(self, text):
        raise RuntimeError("full")

def speak():
    print("h\u00e9")

def wait():
    print("up", flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    launch(speak, start="exec", env={"PYTHONIOENCODING": "utf-8"})
    session = Session(output=Full(), start="exec")
    for call in (partial(launch, wait, output=Full(), start="exec"), partial(session.run, speak)):
        try:
            call()
        except RuntimeError as error:
            print(repr(error))
"""
    assert python(body, PYTHONIOENCODING="ascii").splitlines() == ["h\\xe9", *["RuntimeError('full')"] * 2]


@pytest.mark.ci
def test_launch_async_does_not_block_the_event_loop(python: Python):
    """A second cancellation waits for the end of the ranks, too."""
    body = """
import asyncio, io

async def main():
    output = io.StringIO()
    task, turns = asyncio.ensure_future(launch_async(print, "hi", nproc=2, preload="threading", output=output)), 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0.01)
    print(await task, turns > 5, sorted(line for line in output.getvalue().splitlines() if line.startswith("[")))
    output = io.StringIO()
    task = asyncio.ensure_future(launch_async(wait, output=output))
    while "up" not in output.getvalue():
        await asyncio.sleep(0.01)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.01)
    try:
        await task
    except asyncio.CancelledError:
        print("cancelled", "down" in output.getvalue())

def end(*_):
    time.sleep(0.3)
    print("down", flush=True)
    os._exit(1)

def wait():
    signal.signal(signal.SIGTERM, end)
    print("up", flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    asyncio.run(main())
"""
    assert python(body) == "[None, None] True ['[0] hi', '[1] hi']\ncancelled True\n"


@pytest.mark.ci
def test_a_rank_may_launch(python: Python):
    """Ranks get the given variables, and none that describes the caller's place in another job."""
    body = """
def outer():
    return rank(), os.environ["SIZE"], launch(rank, nproc=2, preload="threading")

if __name__ == "__main__":
    print(launch(outer, nproc=2, preload="threading", env={"SIZE": "big"}))
"""
    lines = python(body, RANK="7", WORLD_SIZE="9", SLURM_JOB_ID="4").splitlines()
    assert lines[-1] == "[(0, 'big', [0, 1]), (1, 'big', [0, 1])]"


def test_ranks_get_all_variables_that_describe_no_rank(python: Python):
    """A variable of the user reaches the ranks whatever its name begins with; ``env`` may be a list or one text."""
    body = """
names = ["LOCAL_SCRATCH", "NODE_OPTIONS", "GROUP_NAME", "WORLD", "MASTER_KEY", "A", "B"]

def show():
    return [os.environ.get(name) for name in names]

if __name__ == "__main__":
    print(*launch(show, nproc=1, preload="threading", env=["A=1=2", "B="]))
    print(launch(show, nproc=1, preload="threading", env="A=3")[0][5:])
"""
    found = python(
        body, LOCAL_SCRATCH="/s", NODE_OPTIONS="-x", GROUP_NAME="g", WORLD="w", MASTER_KEY="k", PET_NNODES="9"
    )
    assert found.splitlines() == ["['/s', '-x', 'g', 'w', 'k', '1=2', '']", "['3', None]"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_caller(tmp_path: Path, number: signal.Signals):
    made = tmp_path / "tmp"
    made.mkdir()
    body = """
def wait():
    print("up", os.getpid(), flush=True)
    time.sleep(1000)

launch(wait, nproc=2, preload="threading")
"""
    script = write_program(tmp_path, "program.py", HEAD + body)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    env = clean_environment({"TMPDIR": str(made)})
    caller = subprocess.Popen([sys.executable, script], cwd=tmp_path, env=env, **pipes)
    pids = [int(caller.stdout.readline().split()[-1]) for _ in range(2)]
    caller.send_signal(number)
    caller.wait()
    caller.stdout.close()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "the end of the ranks")
    wait_until(lambda: list(made.iterdir()) == [], "the end of the launcher")


def test_keywords_are_the_options_of_run():
    assert FILE.read_text(encoding="utf-8") == render_keywords(), "python -m tests.reference writes it anew"
    environment = launched_job.launcher_environment(["A=1", "PATH", "NOSUCH"])
    assert (environment["A"], environment["PATH"], "NOSUCH" in environment) == ("1", os.environ["PATH"], False)


@pytest.mark.ci
def test_type_checkers_see_the_options_and_the_result(tmp_path: Path):
    write_program(
        tmp_path,
        "program.py",
        """
from ddplaunch import Session, launch

def train(lr: float, steps: int) -> str:
    return ""

found: list[str] = launch(train, 0.1, 3, nproc=4, timeout="10m")
other: list[int] = launch(train, 0.1, 3)
launch(train, 0.1, 3, nprocs=4)
with Session(nproc=4) as session:
    again: list[str] = session.run(train, 0.1, 3)
""",
    )
    words = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "program.py"]
    output = run_command(words, tmp_path).stdout
    assert re.findall(r"(?m)^program.py:(\d+).* error", output) == ["7", "8"]


def test_importing_ddplaunch_loads_nothing():
    code = "import sys; before = set(sys.modules); import ddplaunch; print(sorted(set(sys.modules) - before))"
    assert run_command([sys.executable, "-c", code]).stdout == "['ddplaunch']\n"
    code = "import sys, ddplaunch.submitit; print({'click', 'msgspec'} & set(sys.modules))"
    assert run_command([sys.executable, "-c", code]).stdout == "set()\n"
