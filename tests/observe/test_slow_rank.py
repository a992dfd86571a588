"""Tests of the report of slow ranks at the end of a run, with half a second counting as a long run."""

import re
import signal
from contextlib import suppress

import pytest

from ddplaunch.cli.client import JobNotResponding, send_request
from ddplaunch.observe.diagnosis.inspection import Detail
from ddplaunch.observe.node import inspect_side
from ddplaunch.observe.request import InspectJobRequest
from tests.conftest import free_port, wait_until, write_program
from tests.constant_override import launcher_with_constant
from tests.debugger_fixtures import debug_socket
from tests.debugger_fixtures import runtime_dir as runtime_dir
from tests.skewed_clock import skewed_environment

pytestmark = pytest.mark.slow

LONG = "observe.node.inspect_side.LONG_ATTEMPT_S"

PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist

slow, seconds, steps = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
numbers = torch.ones(6)
for _ in range(steps):
    if dist.get_rank() == slow:
        time.sleep(seconds)
    dist.all_reduce(numbers)
if len(sys.argv) > 4:
    exec(sys.argv[4])
dist.destroy_process_group()
"""

SENTENCE = re.compile(
    r"ddplaunch: rank (\d+) was last in (\d+) % of the last (\d+) collectives "
    r"\(median delay (\d+) ms\); the others spent (\d+) % .*\n"
)

PACE = InspectJobRequest(Detail.LATENESS)


@pytest.fixture
def run(start_ddplaunch, tmp_path):
    """Run a job of 3 ranks to its end; return the launcher's stderr."""
    write_program(tmp_path, "program.py", PROGRAM)

    def launch(*words: str, options=(), long=0.5, **how) -> str:
        launcher = start_ddplaunch(
            *("run", "--nproc", "3", *options, "program.py", *words),
            executable=launcher_with_constant(tmp_path, LONG, long), **how,
        )  # fmt: skip
        assert launcher.wait() == 0, launcher.stderr()
        launcher.assert_nothing_left()
        return launcher.stderr()

    return launch


@pytest.mark.ci
@pytest.mark.parametrize(
    "how",
    [
        pytest.param((), id="fork"),
        pytest.param(("--start", "exec", "--nproc", "2"), id="exec", marks=pytest.mark.ci),
        pytest.param(("--backend", "gloo"), id="backend", marks=pytest.mark.ci),
    ],
)
def test_the_slow_rank_is_named(run, how, tmp_path):
    assert inspect_side.LONG_ATTEMPT_S == 300
    if "--backend" in how:
        text = PROGRAM.replace('dist.init_process_group("gloo")', "").replace("dist.destroy_process_group()", "")
        write_program(tmp_path, "program.py", text)
    found = SENTENCE.fullmatch(run("1", "0.03", "40", options=how))
    rank, share, collectives, late, waited = map(int, found.groups())
    assert rank == 1
    assert collectives in (40, 41)
    assert share > 80
    assert late >= 30
    assert waited > 50


@pytest.mark.ci
@pytest.mark.parametrize(("long", "options"), [(60.0, ()), (0.5, ("--no-inspect",))], ids=["short", "no inspect"])
def test_a_short_run_and_one_without_inspection_have_no_report(run, long, options):
    assert run("1", "0.03", "20", long=long, options=options) == ""


OBSTACLES = {
    "a full disk": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))",
    "another's file": "open(trace, 'w').write('{\"entries\": [[[')",
    "a link": "os.symlink('/etc/passwd', trace)",
    "a pipe": "os.mkfifo(trace)",
    "a folder": "os.mkdir(trace)",
    "no recorder": "import torch._C._distributed_c10d as c; del c._dump_fr_trace_json",
    "a recorder that fails": "import torch._C._distributed_c10d as c; c._dump_fr_trace_json = lambda *a: 1 / 0",
    "no folder": "import shutil; shutil.rmtree(os.path.dirname(trace), ignore_errors=True)",
}


@pytest.mark.ci
@pytest.mark.parametrize("three", [list(OBSTACLES)[:3], list(OBSTACLES)[3:6], list(OBSTACLES)[6:]], ids="; ".join)
def test_a_trace_that_cannot_be_written_or_read_is_ignored(run, three):
    trace = "trace = os.environ['TORCHELASTIC_ERROR_FILE'].replace('.json', '.trace.json')"
    obstacles = dict(enumerate(OBSTACLES[each] for each in three))
    assert run("1", "0.03", "40", f"{trace}; exec({obstacles}.get(int(os.environ['RANK']), ''))") == ""


def nodes(start, folder, *words, heartbeat="2", **environ):
    """Two nodes of two ranks, the second with a clock of its own; return each launcher's stderr."""
    write_program(folder, "program.py", PROGRAM)
    launchers = []
    shared = ("--nnodes", "2", "--nproc", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    for number in ("0", "1"):
        launchers.append(
            start(
                *("run", *shared, "--node-rank", number, "--heartbeat-timeout", heartbeat, "program.py", *words),
                executable=launcher_with_constant(folder, LONG, 0.5),
                env=environ if number == "1" else None,
            )
        )
    assert [launcher.wait() for launcher in launchers] == [0, 0], [launcher.stderr() for launcher in launchers]
    return [launcher.stderr() for launcher in launchers]


@pytest.mark.ci
@pytest.mark.parametrize("ahead", [100, -3600])
def test_clocks_of_two_nodes_that_are_apart(start_ddplaunch, tmp_path, ahead):
    """The heartbeats of the first two seconds measure the offset."""
    first, second = nodes(start_ddplaunch, tmp_path, "3", "0.05", "60", **skewed_environment(tmp_path, ahead))
    found = SENTENCE.search(first)
    assert found, first
    assert found[1] == "3"
    assert 50 <= int(found[4]) < 150
    assert "arrived last" not in second


FOREVER = """
import time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
numbers = torch.ones(6)
while True:
    time.sleep(0.01 + 0.04 * (dist.get_rank() == 1))
    dist.all_reduce(numbers)
"""


@pytest.mark.ci
def test_a_running_job_names_its_slow_rank(start_ddplaunch, tmp_path, runtime_dir):
    write_program(tmp_path, "forever.py", FOREVER)
    job = start_ddplaunch("run", "--run-id", "demo", "--nproc", "2", "--grace", "1", "forever.py")
    wait_until(debug_socket, "its control socket")

    def names_it() -> bool:
        with suppress(JobNotResponding):  # before the launcher listens
            return "rank 1 was last in" in "".join(send_request(debug_socket(), PACE).inspection.pace)
        return False

    wait_until(names_it, "the slow rank")
    found = send_request(debug_socket(), InspectJobRequest()).inspection
    assert (found.pace, len(found.ranks)) == ((), 2)
    job.signal(signal.SIGINT)
    assert job.wait() == 130
