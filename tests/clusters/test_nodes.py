"""Systems whose RANK and WORLD_SIZE, or NODE_RANK and NNODES, count nodes; and those of which nobody knows."""

from __future__ import annotations

import json
from importlib import import_module

import pytest

from ddplaunch.clusters import find
from ddplaunch.clusters.finding import Finding
from ddplaunch.errors import UsageError
from tests.clusters.samples import NNODES, PAI, PYTORCHJOB, SLURM_BATCH, TORCH_NODE, VERTEX_AI
from tests.conftest import free_port, write

WITHOUT_A_WORD = {"torchrun --standalone": {**TORCH_NODE, "WORLD_SIZE": "1", "RANK": "0"}, "nobody": {"RANK": "1"}}


@pytest.mark.parametrize(("name", "environ"), [("pai", PAI), ("vertexai", VERTEX_AI), ("nodes", NNODES)])
def test_a_node_of_several(name: str, environ: dict[str, str]) -> None:
    finding = find(environ)
    assert isinstance(finding, Finding)
    assert (finding.cluster, finding.nnodes, finding.node_rank, finding.place) == (name, 2, 1, None)
    assert (finding.address, finding.port) == (environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
    assert finding.nproc == ("8" if "NPROC_PER_NODE" in environ else None)


@pytest.mark.parametrize(("name", "environ"), [("pai", PAI), ("vertexai", VERTEX_AI)])
def test_with_a_local_rank_it_is_a_process(name: str, environ: dict[str, str]) -> None:
    placed = {**environ, "LOCAL_RANK": "0"}
    assert import_module(f"ddplaunch.clusters.{name}").find(placed) is None
    finding = find(placed)
    assert finding
    assert finding.cluster == "torch"


def test_a_pytorchjob_says_how_many_nodes_there_are_itself() -> None:
    finding = find({**PYTORCHJOB, "NPROC_PER_NODE": "8"})
    assert finding
    assert (finding.cluster, finding.nnodes) == ("kubeflow", 2)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"NODE_RANK": ""}, "NODE_RANK is not set"),
        ({"NODE_RANK": "2"}, "NODE_RANK=2 and NNODES=2 contradict"),
        ({"NNODES": "two"}, "NNODES=two is not a number"),
        ({"NPROC_PER_NODE": "many"}, "NPROC_PER_NODE=many is not a number"),
    ],
)
def test_what_cannot_be(changed: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find({**NNODES, **changed})


def test_one_node_is_no_finding() -> None:
    assert find({**NNODES, "NNODES": "1"}) is None
    assert find({"NNODES": "2", "NPROC_PER_NODE": "8"}) is None, "no address"


def test_they_need_no_address_to_be_unclear() -> None:
    """As in a job run of Oracle's Data Science."""
    with pytest.raises(UsageError, match="RANK=1 and WORLD_SIZE=2 without LOCAL_RANK"):
        find({"RANK": "1", "WORLD_SIZE": "2", "MAIN_JOB_RUN_OCID": "ocid1.datasciencejobrun.oc1"})


def test_nobody_says_what_they_count(answer, tmp_path) -> None:
    write(tmp_path, "train.py", "")
    done = answer("run", "--dry-run", "train.py", env=TORCH_NODE)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "Error: RANK=1 and WORLD_SIZE=2 without LOCAL_RANK: they count either nodes or processes",
        '  nodes: ddplaunch run --nnodes "$WORLD_SIZE" --node-rank "$RANK" …; processes: set LOCAL_RANK in each',
        "  neither: ddplaunch run --cluster none …, for this machine alone",
    ]


@pytest.mark.parametrize(
    ("options", "nnodes", "node_rank"),
    [("--nnodes 2 --node-rank 1", 2, 1), ("--cluster none", 1, 0)],
)
def test_what_it_says_to_type_is_understood(answer, tmp_path, options, nnodes, node_rank) -> None:
    write(tmp_path, "train.py", "")
    done = answer("run", "--dry-run", "--json", *options.split(), "train.py", env=TORCH_NODE)
    plan = json.loads(done.stdout)
    assert (plan["nnodes"], plan["node_rank"], plan["master_addr"]) == (
        nnodes,
        node_rank,
        "n1" if nnodes > 1 else "127.0.0.1",
    )


@pytest.mark.parametrize("name", WITHOUT_A_WORD)
def test_what_leaves_no_doubt_is_no_error(name: str) -> None:
    assert find(WITHOUT_A_WORD[name]) is None


def test_a_batch_script_is_heard_after_what_was_set_in_it() -> None:
    finding = find({**SLURM_BATCH, **NNODES})
    assert finding
    assert (finding.cluster, finding.nnodes) == ("nodes", 2)
    with pytest.raises(UsageError, match="without LOCAL_RANK"):
        find({**SLURM_BATCH, **TORCH_NODE})
    alone = find({**SLURM_BATCH, "MASTER_ADDR": "n1", "WORLD_SIZE": "4"})
    assert alone
    assert alone.cluster == "slurm"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shared", "node_rank"),
    [
        ("pai", {"WORLD_SIZE": "2", "NPROC_PER_NODE": "1"}, "RANK"),
        ("runpod", {"WORLD_SIZE": "2", "NUM_NODES": "2", "NUM_TRAINERS": "1"}, "NODE_RANK"),
    ],
)
def test_two_machines_train_together(start, tmp_path, name, shared, node_rank) -> None:
    """Node 0 calls itself localhost, as the masters of some platforms do."""
    write(tmp_path, "train.py", "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    shared = {**shared, "MASTER_PORT": str(free_port())}
    words = ("run", "--start", "exec", "train.py")
    first = start(*words, env={**shared, node_rank: "0", "MASTER_ADDR": "localhost"})
    second = start(*words, env={**shared, node_rank: "1", "MASTER_ADDR": "127.0.0.1"})
    assert (first.wait(), second.wait()) == (0, 0), first.stderr() + second.stderr()
    assert "rank 0 of 2" in first.stdout()
    assert "rank 1 of 2" in second.stdout()
    assert f"{name}: this is node 0 of 2" in first.stderr()
