"""Tests of programs in jobs of several nodes: they run on node 0, and all ranks reach them. Here on one machine."""

import json
import random
import signal
import sys
import time

import pytest

from tests.conftest import PROGRAMS, free_port, wait_until
from tests.fake_nvml import fake_nvml as fake_nvml
from tests.start_modes import EXEC

pytestmark = pytest.mark.slow

SERVER = ("--command", "--name", "vllm", "--ready", "http:/health", sys.executable, PROGRAMS / "server.py", "{port}")


@pytest.fixture
def begin(start_ddplaunch):
    """Start a job of two nodes; of none is anything left at the end."""
    jobs = []

    def start(*how, rank=()):
        port = str(free_port())
        for node in ("0", "1"):
            where = ("--nnodes", "2", "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port)
            target = ("--nproc", "1", *EXEC, PROGRAMS / "client.py", "http://{vllm}/x", *rank)
            jobs.append(start_ddplaunch("run", *SERVER, *how, ":", *where, *target))
        return jobs

    yield start
    for job in jobs:
        job.wait()
        job.assert_nothing_left()


@pytest.mark.ci
def test_ranks_of_all_nodes_wait_for_the_server_of_node_0(begin):
    jobs = begin("late=0.5", rank=("once",))
    assert [job.wait() for job in jobs] == [0, 0]
    for number, job in enumerate(jobs):
        assert f"rank {number} got ok from http://127.0.0.1:" in job.stdout()
    assert "[vllm] listening" in jobs[0].stderr()
    assert "[vllm]" not in jobs[1].stderr()


@pytest.mark.ci
def test_all_nodes_end_with_the_code_of_the_server(begin, tmp_path):
    jobs = begin("exit=7")
    for job in jobs:
        job.wait_for("got ok")
    (tmp_path / "end").touch()
    assert [job.wait() for job in jobs] == [7, 7]
    for job in jobs:
        assert "vllm exited with code 7 before client.py was done" in job.stderr()


@pytest.mark.ci
def test_a_server_that_ends_before_it_is_ready_ends_all_nodes(begin, tmp_path):
    jobs = begin("late=1000", "exit=3")
    wait_until(lambda: "waiting for vllm" in jobs[0].stderr(), "the wait")
    (tmp_path / "end").touch()
    assert [job.wait() for job in jobs] == [3, 3]


@pytest.mark.ci
def test_ctrl_c_on_another_node(begin):
    jobs = begin()
    for job in jobs:
        job.wait_for("got ok")
    jobs[1].signal(signal.SIGINT)
    assert [job.wait() for job in jobs] == [130, 130]
    assert "asked to end" in jobs[0].stderr()


@pytest.mark.ci
def test_kill_9_of_node_0_ends_the_server_and_the_other_node(begin):
    jobs = begin("children")
    for job in jobs:
        job.wait_for("got ok")
    jobs[0].signal(signal.SIGKILL)
    assert jobs[1].wait() == 69


# ---------------------------------------------------------------------------------------- nodes that run no ranks


def service(name, *how, nodes=1, options=()):
    """The words of a part with a server on nodes of its own."""
    first = ("--command", "--name", name, "--nodes", nodes, "--ready", "http:/health", *options)
    return (*first, sys.executable, PROGRAMS / "server.py", "{port}", *how, ":")


MAIN = ("--command", "--name", "orch", "--kind", "main", "--nodes", "1", "sleep", "1000", ":")


@pytest.fixture
def begin_nodes(start_ddplaunch):
    """Start a job of several nodes, of which the first two have a rank each; of none is anything left at the end."""
    jobs = []

    def start(count, *parts, rank=(), options=()):
        port = str(free_port())
        for node in range(count):
            where = ("--nnodes", count, "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port)
            target = ("--nproc", "1", *EXEC, PROGRAMS / "client.py", "http://{vllm}/x", *rank)
            jobs.append(start_ddplaunch("run", *parts, *where, *options, *target))
        return jobs

    yield start
    for job in jobs:
        job.wait()
        job.assert_nothing_left()


@pytest.mark.ci
def test_a_server_on_a_node_without_ranks(begin_nodes):
    """Ranks run on the first nodes only, and reach it; its node ends with the others."""
    jobs = begin_nodes(3, *service("vllm", "late=0.3"), rank=("once",))
    assert [job.wait() for job in jobs] == [0, 0, 0]
    for number, job in enumerate(jobs[:2]):
        assert f"rank {number} got ok from http://127.0.0.1:" in job.stdout()
    assert "[vllm] asked to end" in jobs[2].stderr()
    assert jobs[2].stdout() == ""
    assert "waiting for vllm" in jobs[0].stderr()
    for job in jobs:
        assert "ddplaunch: vllm is ready at 127.0.0.1:" in job.stderr()


@pytest.mark.ci
def test_node_0_lists_the_programs_of_other_nodes(begin_nodes, tmp_path):
    jobs = begin_nodes(3, *service("vllm"), options=("--log-dir", "logs"))
    for job in jobs[:2]:
        job.wait_for("got ok")
    (tmp_path / "go").touch()
    assert [job.wait() for job in jobs] == [0, 0, 0]
    (events,) = (tmp_path / "logs").glob("*/node-0/events.jsonl")
    seen = [json.loads(line) for line in events.read_text().splitlines()]
    planned, ready = (
        next(each for each in seen if each["event"] == f"program_{what}") for what in ("planned", "ready")
    )
    assert (planned["program"], planned["kind"], ready["program"]) == ("vllm", "service", "vllm")
    assert f"vllm is ready at {planned['address']}" in jobs[2].stderr()


@pytest.mark.ci
def test_programs_start_in_order_across_nodes_and_all_addresses_are_known(begin_nodes):
    """``env`` on node 0 comes after the two servers on nodes of their own, the main on another."""
    env = ("--command", "--name", "env", "--after", "vllm", "--ready", "line:up", "sh", "-c",
           "echo {vllm} $DDPLAUNCH_VLLM_ADDRESS {orch.host} up; exec sleep 1000", ":")  # fmt: skip
    main = ("--command", "--name", "orch", "--kind", "main", "--nodes", "1", "--after", "env", "true", ":")
    jobs = begin_nodes(5, *env, *service("vllm", "late=0.3", nodes=2), *main, rank=("once",))
    assert [job.wait() for job in jobs] == [0] * 5
    assert "[env] 127.0.0.1:" in jobs[0].stderr()
    shown = next(line for line in jobs[0].stderr().splitlines() if line.startswith("[env]"))
    _, first, second, host, _ = shown.split()
    assert (first, host) == (second, "127.0.0.1")
    for index in (0, 1):
        assert f"vllm.{index} is ready" in jobs[2 + index].stderr()
        assert f"[vllm.{index}] asked to end" in jobs[2 + index].stderr()


@pytest.mark.ci
@pytest.mark.parametrize(("code", "exit_code"), [(0, 1), (7, 7)])
def test_a_server_that_ends_on_a_node_without_ranks(begin_nodes, tmp_path, code, exit_code):
    jobs = begin_nodes(3, *service("vllm", f"exit={code}"))
    for job in jobs[:2]:
        job.wait_for("got ok")
    (tmp_path / "end").touch()
    assert [job.wait() for job in jobs] == [exit_code] * 3
    for job in jobs:
        assert f"vllm exited with code {code} before client.py was done (exit code {exit_code})" in job.stderr()
        assert "meanwhile: ranks 0, 1: " in job.stderr()


@pytest.mark.ci
def test_a_node_without_ranks_that_is_lost(begin_nodes):
    """While its server is awaited, and while ranks run."""
    for how in ("late=1000", "late=0"):
        jobs = begin_nodes(3, *service("vllm", how, "children"))[-3:]
        if how == "late=0":
            for job in jobs[:2]:
                job.wait_for("got ok")
        else:
            wait_until(lambda job=jobs[2]: "[vllm] server" in job.stderr(), "the server")
        jobs[2].signal(signal.SIGKILL)
        assert [job.wait() for job in jobs] == [69, 69, -9]
        assert "node 2 (" in jobs[0].stderr()
        assert " was lost: " in jobs[0].stderr()


@pytest.mark.ci
def test_kill_9_of_node_0_ends_a_node_that_waits_for_its_server_and_one_that_has_it(begin_nodes):
    for how in ("late=1000", "late=0"):
        jobs = begin_nodes(3, *service("vllm", how))[-3:]
        wait_until(lambda job=jobs[2]: "[vllm] server" in job.stderr(), "the server")
        if how == "late=0":
            for job in jobs[:2]:
                job.wait_for("got ok")
        jobs[0].signal(signal.SIGKILL)
        assert [job.wait() for job in jobs] == [-9, 69, 69]


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(4))
def test_kill_9_of_any_launcher_at_any_moment_leaves_nothing(begin_nodes, seed):
    """The others end too: before the start they wait for a lost node 0 no longer than for nodes that join."""
    chance = random.Random(seed + time.time_ns())
    victim, moment = chance.randrange(3), chance.uniform(0.2, 2.5)
    jobs = begin_nodes(3, *service("vllm", "children", "late=0.2"), options=("--join-timeout", "3"))
    time.sleep(moment)  # the thing tested is a random moment
    jobs[victim].signal(signal.SIGKILL)
    codes = [job.wait() for job in jobs]
    assert codes[victim] == -9
    assert {codes[number] for number in range(3) if number != victim} == {69}, (victim, moment, codes)


@pytest.mark.ci
def test_ctrl_c_reaches_a_main_on_a_node_without_ranks(begin_nodes):
    jobs = begin_nodes(4, *service("vllm"), *MAIN)
    for job in jobs[:2]:
        job.wait_for("got ok")
    jobs[2].signal(signal.SIGINT)
    assert [job.wait() for job in jobs] == [130] * 4
    assert jobs[0].stdout().count("has saved") == 1


SAVING = """
import os, signal, sys, time, urllib.request

def save(*_):
    time.sleep(1)
    urllib.request.urlopen(sys.argv[1], timeout=10)
    print("main has saved", flush=True)
    os._exit(0)

signal.signal(signal.SIGINT, save)
print("main runs", flush=True)
time.sleep(1000)
"""


@pytest.mark.ci
def test_a_service_lives_until_a_main_on_another_node_has_saved(begin_nodes, tmp_path):
    (tmp_path / "main.py").write_text(SAVING)
    main = ("--command", "--name", "orch", "--kind", "main", "--nodes", "1", "--ready", "line:main runs")
    jobs = begin_nodes(4, *service("vllm"), *main, sys.executable, "main.py", "http://{vllm}/x", ":")
    wait_until(lambda: "main runs" in jobs[3].stderr(), "the main")
    for job in jobs[:2]:
        job.wait_for("got ok")
    jobs[0].signal(signal.SIGINT)
    assert [job.wait() for job in jobs] == [130] * 4
    assert "[orch] main has saved" in jobs[3].stderr()


@pytest.mark.ci
def test_ps_on_a_node_without_ranks(begin_nodes, run_ddplaunch, tmp_path):
    jobs = begin_nodes(3, *service("vllm", options=("--ready", "file:ready")))

    pids = [job.process.pid for job in jobs]

    def states() -> list[tuple[int, str]]:
        entries = json.loads(run_ddplaunch("ps", "--json").stdout)
        return sorted((each["node_rank"], each["state"]) for each in entries if each["pid"] in pids)

    wait_until(lambda: "listening" in jobs[2].stderr(), "the server")
    awaited = states()
    (tmp_path / "ready").touch()
    for job in jobs[:2]:
        job.wait_for("got ok")
    running = states()
    (tmp_path / "go").touch()
    assert awaited == [(0, "starting"), (1, "starting"), (2, "starting")]
    assert running == [(0, "running"), (1, "running"), (2, "running")]
    assert [job.wait() for job in jobs] == [0] * 3


@pytest.mark.ci
def test_ctrl_c_twice_on_a_node_without_ranks_kills_a_deaf_server(begin_nodes):
    jobs = begin_nodes(3, *service("vllm", "deaf"))
    for job in jobs[:2]:
        job.wait_for("got ok")

    def has_ended_after_ctrl_c() -> bool:
        jobs[2].signal(signal.SIGINT)
        return jobs[2].process.poll() is not None

    wait_until(has_ended_after_ctrl_c, "the end of the node", 15)
    assert [job.wait() for job in jobs] == [130] * 3


@pytest.mark.ci
def test_a_restart_starts_programs_of_all_nodes_again(begin_nodes, tmp_path):
    script = "test -e ended && exec $0 $1 $2; touch ended; exec $0 $1 $2 exit=3"
    first = ("--command", "--name", "vllm", "--nodes", "1", "--ready", "http:/health", "sh", "-c", script)
    command = (*first, sys.executable, PROGRAMS / "server.py", "{port}", ":")
    jobs = begin_nodes(3, *command, options=("--max-restarts", "1"))
    jobs[0].wait_for("got ok")
    (tmp_path / "end").touch()
    wait_until(lambda: "restart 1 of 1" in jobs[2].stderr(), "the restart")
    jobs[0].wait_for("got ok", 2)
    (tmp_path / "go").touch()
    assert [job.wait() for job in jobs] == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--nnodes", "2"), "the programs need at least 4 nodes, and the job has 2\n  client.py 1, vllm 3; --nodes"),
        (("--nnodes", "3", "--spares", "2"), "--spares 2 does not work with nodes of vllm"),
        (("--nnodes", "2:4"), "--nnodes 2:4 does not work with nodes of vllm"),
        (("--nnodes", "4", "--node-rank", "auto"), "--node-rank auto does not work with nodes of vllm"),
    ],
)
def test_nodes_that_do_not_fit(run_in_fork, options, expected):
    where = ("--node-rank", "0", "--master-addr", "127.0.0.1", *options)
    done = run_in_fork("run", *service("vllm", nodes=3), *where, "--nproc", "1", PROGRAMS / "client.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr


def test_a_dry_run_shows_the_nodes_with_ranks(run_in_fork):
    where = ("--nnodes", "3", "--node-rank", "0", "--master-addr", "127.0.0.1", "--dry-run")
    done = run_in_fork("run", *service("vllm"), *where, "--nproc", "2", PROGRAMS / "client.py")
    assert "program vllm  service  node 2  GPUs -  ready http:/health  after -  " in done.stdout
    assert "2 nodes" in done.stdout
    assert "rank 3  node 1" in done.stdout
    for node in (1, 2):
        assert f"node {node}: ddplaunch run --nnodes 3 --node-rank {node} " in done.stdout
    other = run_in_fork("run", *service("vllm"), *where, "--node-rank", "2", "--nproc", "2", PROGRAMS / "client.py")
    assert (other.returncode, other.stdout) == (2, "")
    assert "--node-rank 2 has no ranks: it runs vllm" in other.stderr


@pytest.mark.ci
def test_programs_on_each_node_and_beside_another(start_ddplaunch):
    """The one on the same node is the one that others there use."""
    serve = (sys.executable, PROGRAMS / "server.py", "{port}", ":")
    exporter = ("--command", "--name", "exporter", "--each-node", *serve)
    shows = ("sh", "-c", "echo at {data}; exec sleep 1000", ":")
    worker = ("--command", "--name", "worker", "--with", "data", "--count", "2", "--after", "data", *shows)
    port = str(free_port())
    where = ("--nnodes", "3", "--master-addr", "127.0.0.1", "--master-port", port)
    rank = ("--nproc", "1", "--no-python", "echo", "{exporter}", "{data.all}")
    data = service("data", nodes=2)
    jobs = [start_ddplaunch("run", *worker, *data, *exporter, *where, "--node-rank", node, *rank) for node in range(3)]
    assert [job.wait() for job in jobs] == [0, 0, 0], jobs[0].stderr()
    own, both = jobs[0].stdout().split()
    assert f"exporter.0 is ready at {own} " in jobs[0].stderr()
    for index, job in enumerate(jobs[1:]):
        address = both.split(",")[index]
        assert f"data.{index} is ready at {address} " in job.stderr()
        assert job.stderr().count(f"] at {address}\n") == 2
        assert f"exporter.{index + 1} is ready at " in job.stderr()
        job.assert_nothing_left()


@pytest.mark.ci
def test_gpus_are_divided_on_each_node(start_ddplaunch, fake_nvml):
    shows = "echo GPUs $CUDA_VISIBLE_DEVICES.; exec sleep 1000"
    infer = ("--command", "--name", "infer", "--nodes", "1", "--gpus", "all", "sh", "-c", shows, ":")
    judge = ("--command", "--name", "judge", "--gpus-per-node", "1", "sh", "-c", shows, ":")
    port = str(free_port())
    where = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    jobs = [
        start_ddplaunch("run", *infer, *judge, *where, "--node-rank", node, "--no-python", "true",
                        env=fake_nvml.environ(4))
        for node in range(2)
    ]  # fmt: skip
    assert [job.wait() for job in jobs] == [0, 0]
    assert "[judge] GPUs 0.\n" in jobs[0].stderr()
    assert "[infer] GPUs 0,1,2,3.\n" in jobs[1].stderr()
