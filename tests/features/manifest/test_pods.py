"""Tests of ``ddplaunch run`` in simulated pods of its own manifest, also where names resolve late."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Launch, free_port, wait_until, write_program
from tests.features.manifest.pods import Pod, pods
from tests.scaled_timeouts import scaled_timeout
from tests.tools.virtual_hosts.network import Network

REDUCES = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.full((1,), float(os.environ["RANK"]) + 1)
dist.all_reduce(total)
print("rank", os.environ["RANK"], "sum", total.item(), os.environ["PRICE"], flush=True)
dist.destroy_process_group()
"""


ASKS = """
import os
import sys
import urllib.request

with urllib.request.urlopen(sys.argv[1]) as reply:
    print("rank", os.environ["RANK"], "got", reply.status)
"""


@pytest.fixture
def job(run_in_fork: Launch, tmp_path: Path) -> Callable[..., list[Pod]]:
    """The pods of ``ddplaunch manifest WORDS``, with an image that has our Python."""
    write_program(tmp_path, "train.py", REDUCES)
    words = ("--container-image", "registry.example/wine:1", "--env", "PRICE=$(cat x) $5")

    def print_it(*options: str) -> list[Pod]:
        done = run_in_fork("manifest", *words, *options, "train.py")
        assert done.returncode == 0, done.stderr
        return pods(done.stdout)

    return print_it


def environ_of(pod: Pod) -> dict[str, str]:
    """Return the variables of the image and the manifest, with folders of the tests for what a pod leaves."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.defpath])
    of_image = {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", "CUDA_VISIBLE_DEVICES": ""}
    ours = {name: os.environ[name] for name in ("TMPDIR", "XDG_STATE_HOME")}
    return {**of_image, **ours, **pod.environ}


def run(pod: Pod, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with what the pod has, to its end."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.run(words, cwd=folder, env=environ_of(pod), timeout=scaled_timeout(90), **pipes)


@pytest.fixture
def dry_run(run_in_fork: Launch) -> Callable[[Pod], dict]:
    """Return the plan that ``ddplaunch run`` makes in a pod."""

    def read_plan(pod: Pod) -> dict:
        words = pod.words[pod.words.index("run") + 1 :]
        done = run_in_fork("run", "--dry-run", "--json", *words, env=environ_of(pod))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return read_plan


def test_pods_of_programs_run_one_job(run_in_fork, tmp_path):
    """A JobSet of two Jobs, without the cluster's names: each pod finds its node rank, and what it runs."""
    write_program(tmp_path, "ask.py", ASKS)
    web = ("--command", "--name", "web", "--nodes", "1", "--ready", "http:/", "python3", "-m", "http.server", "{port}")
    options = ("--container-image", "wine:1", "--nodes", "2", "--gpus-per-node", "1", "--nproc", "2")
    done = run_in_fork("manifest", *web, ":", *options, "ask.py", "http://{web}")
    first, second = pods(done.stdout)
    assert [pod.hostname for pod in (first, second)] == ["ask-ask-0-0", "ask-web-0-0"]
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    for pod in (first, second):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(pod.words, cwd=tmp_path, env={**environ_of(pod), **environ}, **pipes))
    outputs = [each.communicate(timeout=scaled_timeout(90))[0] for each in started]
    assert [each.returncode for each in started] == [0, 0], outputs
    assert "rank 1 got 200" in outputs[0]
    assert "web: port" in outputs[1]


@pytest.mark.parametrize(
    ("options", "master"),
    [
        ((), ("train-0.train", 29500)),
        (("--kind", "jobset"), ("train-node-0-0.train", 29500)),
        (("--kind", "pytorchjob"), ("train-master-0", 23456)),
        (("--kind", "pytorchjob", "--host-network"), ("train-master-0", 29500)),
    ],
)
def test_each_pod_finds_its_node_rank(job, dry_run, options, master):
    for index, pod in enumerate(job("--nodes", "3", "--nproc", "2", *options)):
        plan = dry_run(pod)
        assert (plan["nnodes"], plan["node_rank"], plan["world_size"]) == (3, index, 6)
        assert (plan["master_addr"], plan["master_port"]) == master
        here = [rank["rank"] for rank in plan["ranks"] if rank["node_rank"] == index]
        assert here == [2 * index, 2 * index + 1]
        noted = any(note.startswith("kubernetes: this is node 0 of 3") for note in plan["notes"])
        assert noted == (index == 0 and "pytorchjob" not in options)


def test_a_pod_of_an_elastic_job_finds_its_node_rank(job, dry_run):
    pod = job("--nodes", "2:3", "--nproc", "2")[2]
    plan = dry_run(pod)
    assert (plan["nnodes"], plan["node_rank"]) == (3, 2)
    assert plan["facts"][0]["value"] == "2 to 3, planned for 3"


@pytest.mark.ci
def test_a_pod_alone(job, dry_run, tmp_path):
    (pod,) = job()
    plan = dry_run(pod)
    assert (plan["nnodes"], plan["world_size"], plan["master_addr"]) == (1, 1, "127.0.0.1")
    assert not [note for note in plan["notes"] if "kubernetes" in note]
    done = run(pod, pod.words, tmp_path)
    assert (done.returncode, done.stdout) == (0, "rank 0 sum 1.0 $(cat x) $5\n"), done.stderr


class Cluster:
    """A virtual host for each pod; names are what /etc/hosts says at the moment."""

    def __init__(self, folder: Path, network: Network, job: list[Pod]) -> None:
        self.folder, self.network, self.job = folder, network, job

    def start(self, index: int) -> subprocess.Popen[str]:
        with self.stderr_path(index).open("w") as err:
            return self.network.hosts[index].start(
                self.job[index].words, cwd=self.folder, env=environ_of(self.job[index]),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, text=True,
            )  # fmt: skip

    def start_all(self, program: str) -> list[subprocess.Popen[str]]:
        """Start all pods with this program, where names are known to all."""
        write_program(self.folder, "train.py", program)
        for index in range(len(self.network.hosts)):
            self.name("10.77.0.10", on=index)
        return [self.start(index) for index in range(len(self.network.hosts))]

    def stderr_path(self, index: int) -> Path:
        return self.folder / f"pod-{index}.err"

    def name(self, address: str, *, on: int) -> None:
        """Let the pod resolve node 0 to ``address`` now."""
        host, name = self.network.hosts[on], self.job[0].domain_name
        script = (
            f"grep -v {name} /etc/hosts > hosts-{on}; echo {address} {name} >> hosts-{on}; cat hosts-{on} > /etc/hosts"
        )
        host.run("sh", "-c", script, cwd=self.folder)


@pytest.fixture
def cluster(job, network, tmp_path) -> Callable[..., Cluster]:
    def make(*options: str, nodes: str = "2", hosts: int = 2) -> Cluster:
        return Cluster(tmp_path, network(hosts), job("--nodes", nodes, "--nproc", "1", *options))

    return make


@pytest.mark.ci
def test_two_pods_meet_though_the_name_comes_late(cluster):
    """Two pods join, though node 1 starts before node 0 has a name, and node 0 while its name is an earlier pod's.

    Both say only after 5 s what they wait for, so neither is waited for alone.
    """
    two = cluster()
    other = two.start(1)
    two.name("10.77.0.99", on=0)
    zero = two.start(0)
    wait_until(lambda: "train-0.train does not resolve yet" in two.stderr_path(1).read_text(), "what node 1 waits for")
    wait_until(lambda: "waiting for" in two.stderr_path(0).read_text(), "node 0 to wait")
    two.name("10.77.0.10", on=1)
    out = [process.communicate(timeout=scaled_timeout(90))[0] for process in (zero, other)]
    output = [two.stderr_path(index).read_text() for index in range(2)]
    assert (zero.returncode, other.returncode) == (0, 0), output
    assert [text.split("] ", 1)[-1] for text in out] == [f"rank {rank} sum 3.0 $(cat x) $5\n" for rank in range(2)]
    assert "kubernetes: this is node 0 of 2, at train-0.train" in output[0]


@pytest.mark.ci
def test_a_node_0_that_never_has_a_name_is_a_lost_node(cluster):
    """A node 0 without a name ends the pod with 69, after which the Job starts it again."""
    two = cluster("--join-timeout", "2")
    other = two.start(1)
    other.communicate(timeout=scaled_timeout(60))
    assert other.returncode == 69
    output = two.stderr_path(1).read_text()
    assert "2 s (--join-timeout): train-0.train does not resolve" in output


@pytest.mark.ci
def test_a_pod_that_is_deleted_ends_an_elastic_job_with_143(cluster):
    """An elastic job that runs without its third pod ends with 143 when a pod is deleted."""
    waits = REDUCES.replace("dist.destroy_process_group()", "import time; time.sleep(600)")
    started = cluster("--join-window", "1", nodes="2:3").start_all(waits)
    for process in started:
        assert "sum 3.0" in process.stdout.readline()
    started[1].terminate()
    for process in started:
        process.communicate(timeout=scaled_timeout(90))
    assert [process.returncode for process in started] == [143, 143]
