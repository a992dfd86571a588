"""Tests of the planner as a pure function of options and machine: every rank and every source."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.plan_text import node_command
from ddplaunch.system.plan.hardware import explain_shared_mig
from ddplaunch.system.plan.plan import Fact, Plan
from ddplaunch.system.plan.planner import MachineInfo, PlanSpec, make_plan
from ddplaunch.system.plan.rank_layout import DeviceSlot
from ddplaunch.system.target.target import Target, TargetKind

SCRIPT = Target(TargetKind.SCRIPT, "train.py", ("--lr", "1"), path="train.py", sys_path_0="/x", source="/x/train.py")
CPU = MachineInfo("here", tuple(range(16)), 8, numa=(tuple(range(8)), tuple(range(8, 16))))
GPUS = replace(
    CPU,
    slots=tuple(DeviceSlot(f"cuda:{index}", "NVIDIA H100", (2 * index, 2 * index + 1), "nccl") for index in range(4)),
    slots_source="NVML",
    variables={"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
)


def plan(
    machine: MachineInfo = CPU, environ: dict[str, str] | None = None, target: Target = SCRIPT, **typed: object
) -> Plan:
    return make_plan(PlanSpec(**typed), target, machine, environ or {}, "id")  # type: ignore[arg-type]


def fact(plan: Plan, name: str) -> Fact:
    (found,) = (fact for fact in plan.facts if fact.name == name)
    return found


def test_a_plan_is_frozen():
    with pytest.raises(AttributeError):
        plan().master_port = 1  # type: ignore[misc]


def test_one_node_without_gpus():
    made = plan()
    assert (made.nnodes, made.world_size, made.master_addr, made.master_port) == (1, 1, "127.0.0.1", 0)
    assert fact(made, "ranks per node").value == "1"
    assert fact(made, "devices") == Fact("devices", "cpu", "no GPU found")
    assert made.backend is None
    assert made.missing_options == ()


def test_one_rank_a_gpu():
    made = plan(GPUS)
    assert [rank.device for rank in made.ranks] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert fact(made, "devices") == Fact("devices", "4 × NVIDIA H100 (cuda:0 to cuda:3)", "NVML")
    assert made.rank_environment(made.ranks[0])["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


@pytest.mark.parametrize(
    ("usable", "bind", "threads"), [(6, None, "3"), (1, None, "1"), (6, "numa", "3"), (16, "numa", "8")]
)
def test_a_containers_share_of_the_cpus(usable, bind, threads):
    made = plan(replace(CPU, usable_cpus=usable), nproc="2", bind=bind)
    output = fact(made, "threads per rank")
    assert (output.value, "quota" in output.source) == (threads, usable < 16)


def test_variables():
    made = plan(nproc="2,1", nnodes=2, node_rank=1, master_addr="a", master_port=7, max_restarts=3)
    assert made.rank_environment(made.ranks[1], attempt=2) == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "ROLE_NAME": "default",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "7",
        "OMP_NUM_THREADS": "8",
        "TORCHELASTIC_RUN_ID": "id",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "DDPLAUNCH_DEVICE": "cpu",
    }
    assert made.rank_environment(made.ranks[2])["OMP_NUM_THREADS"] == "16"
    assert made.shared_environment == {"OMP_NUM_THREADS": "16", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def test_who_opens_the_store():
    """A single rank opens its own store, unless the job had more ranks in an earlier attempt."""
    lone, two = plan(nproc="1"), plan(nproc="2")
    elastic = replace(lone, min_nodes=1)
    for made, torch, expected in (
        (two, True, "True"),
        (two, False, "False"),
        (lone, True, "False"),
        (elastic, True, "True"),
    ):
        variables = made.with_store(torch=torch).rank_environment(made.ranks[0])
        assert variables["TORCHELASTIC_USE_AGENT_STORE"] == expected


def test_the_users_own_variables_are_kept():
    environ = {"OMP_NUM_THREADS": "3", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    made = plan(environ=environ, nproc="2")
    assert environ.items() <= made.rank_environment(made.ranks[1]).items()
    assert fact(made, "threads per rank") == Fact("threads per rank", "3", "OMP_NUM_THREADS")


def test_all_nodes_make_the_same_plan():
    """Each node plans alone: all must get the same ranks and variables, and the same of each other."""
    typed = {"nproc": "3,1,2", "nnodes": 3, "master_addr": "a", "master_port": 7, "bind": "numa"}
    plans = [plan(node_rank=node_rank, **typed) for node_rank in range(3)]
    seen = [[(replace(rank, host=None), made.rank_environment(rank)) for rank in made.ranks] for made in plans]
    assert seen[0] == seen[1] == seen[2]
    assert [[rank.rank for rank in made.local_ranks] for made in plans] == [[0, 1, 2], [3], [4, 5]]
    assert [made.holds_store for made in plans] == [True, False, False]


def test_flags_beat_variables_beat_detection():
    environ = {"NODE_RANK": "1", "MASTER_ADDR": "b", "MASTER_PORT": "8"}
    made = plan(GPUS, environ, nnodes=2)
    assert (made.node_rank, made.master_addr, made.master_port) == (1, "b", 8)
    assert [fact(made, name).source for name in ("node rank", "master address", "master port")] == [
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ]
    flags = plan(GPUS, environ, nnodes=2, node_rank=0, master_addr="c", master_port=9, nproc="2")
    assert (flags.node_rank, flags.master_addr, flags.master_port, flags.world_size) == (0, "c", 9, 4)
    assert plan(GPUS, environ).master_addr == "127.0.0.1"


def test_what_is_known_of_other_nodes_is_marked():
    made = plan(GPUS, nnodes=3, node_rank=1, master_addr="a")
    assert [(node.host, node.source) for node in made.nodes] == [
        ("a", "assumed"),
        ("here", "4 GPUs found"),
        (None, "assumed"),
    ]
    assert [node.source for node in plan(GPUS, nnodes=2, nproc="1").nodes] == ["--nproc", "--nproc"]


@pytest.mark.parametrize(
    ("typed", "environ", "missing"),
    [
        ({}, {}, ("--node-rank", "--master-addr", "--master-port", "--nproc as a number")),
        ({"nproc": "4", "node_rank": 0, "master_addr": "a", "master_port": 1}, {}, ()),
        ({"nproc": "auto", "node_rank": 0, "master_addr": "a", "master_port": 1}, {}, ("--nproc as a number",)),
        ({"gpus": "0", "node_rank": 0, "master_addr": "a", "master_port": 1}, {}, ()),
        ({"nproc": "4", "node_rank": 0, "init_method": "tcp://a:1"}, {}, ()),
        ({"nproc": "4"}, {"NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, ()),
        ({"nproc": "4", "node_rank": 1}, {"MASTER_ADDR": "a"}, ("--master-port",)),
    ],
)
def test_missing_options_of_a_node_are_named(typed, environ, missing):
    assert plan(GPUS, environ, nnodes=2, **typed).missing_options == missing


@pytest.mark.parametrize(
    ("machine", "typed", "message", "hint"),
    [
        (CPU, {"nnodes": 0}, "--nnodes 0", "leave it out"),
        (CPU, {"nnodes": -2}, "--nnodes -2", "leave it out"),
        (CPU, {"node_rank": 1}, "--node-rank 1 is out of range: the only node is 0", "--nnodes 2"),
        (
            CPU,
            {"nnodes": 2, "node_rank": 2},
            "--node-rank 2 is out of range: 2 nodes are numbered 0 to 1",
            "--nnodes 3",
        ),
        (CPU, {"nnodes": 2, "node_rank": -1}, "--node-rank -1 is out of range", "--node-rank 0"),
        (CPU, {"backend": "nccl"}, "--backend nccl needs GPUs, and this machine has no visible GPU", "--backend gloo"),
        (GPUS, {"backend": "nccl", "nproc": "5"}, "5 ranks on 4 visible GPUs", "--nproc 4, or --backend gloo"),
        (GPUS, {"backend": "auto", "nproc": "5"}, "5 ranks on 4 visible GPUs", "--nproc 4"),
        (GPUS, {"backend": "cuda:nccl,cpu:gloo", "nproc": "5"}, "5 ranks on 4 visible GPUs", "--nproc 4"),
        (GPUS, {"gpus": "0,1,2,3", "nproc": "5"}, "--nproc 5 and --gpus 0,1,2,3 contradict each other", "--nproc 4"),
    ],
)
def test_contradictions(machine, typed, message, hint):
    with pytest.raises(UsageError) as refusal:
        plan(machine, **typed)
    assert refusal.value.message.startswith(message)
    assert hint in (refusal.value.hint or "")


def test_a_node_rank_variable_that_is_not_a_number():
    with pytest.raises(UsageError, match="NODE_RANK=x"):
        plan(environ={"NODE_RANK": "x"}, nnodes=2)
    assert plan(environ={"NODE_RANK": "x"}).node_rank == 0


def test_more_ranks_than_gpus_is_noted():
    assert "more ranks than GPUs: 5 ranks on 4 GPUs" in plan(GPUS, nproc="5").notes[0]
    shared = plan(GPUS, nproc="5", backend="nccl", oversubscribe=True)
    assert "5 ranks share 4 GPUs" in shared.notes[0]
    assert shared.ranks[4].device == "cuda:0"
    assert not plan(GPUS, nproc="4", backend="nccl").notes


@pytest.mark.parametrize(
    ("backend", "ranks", "noted"), [(None, "2", True), ("nccl", "2", True), ("gloo", "2", False), ("nccl", "1", False)]
)
def test_ranks_on_mig_instances_of_one_gpu_are_noted(backend, ranks, noted):
    halves = replace(GPUS, slots=tuple(replace(slot, divided_gpu=0) for slot in GPUS.slots[:2]))
    expected = "2 ranks have MIG instances of GPU 0: NCCL needs NCCL_MULTI_RANK_GPU_ENABLE=1 for that"
    notes = plan(halves, nproc=ranks, backend=backend).notes
    assert [note for note in notes if note.startswith(expected)] == [*notes][: int(noted)]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, r"NCCL needs NCCL_MULTI_RANK_GPU_ENABLE=1 for that .*; gloo works without"),
        ({"NCCL_NVLS_ENABLE": "1"}, r"NCCL needs NCCL_MULTI_RANK_GPU_ENABLE=1 .*, and no NCCL_NVLS_ENABLE=1; gloo .*"),
        ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, ""),
        ({"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "2"}, ""),
        ({"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}, "NCCL refuses that with NCCL_NVLS_ENABLE=1.*"),
    ],
)
def test_what_nccl_needs_for_mig_instances_of_one_gpu(environ, expected):
    assert re.fullmatch(expected, explain_shared_mig(environ))


def test_a_program_has_no_process_group():
    with pytest.raises(UsageError, match="need a Python target"):
        plan(target=Target(TargetKind.PROGRAM, "./prog"), backend="gloo")


@pytest.mark.parametrize(
    ("target", "tail"),
    [
        (SCRIPT, ["train.py", "--", "--lr", "1"]),
        (Target(TargetKind.SCRIPT, "train.py", ("a b", "c")), ["train.py", "--", "a b", "c"]),
        (Target(TargetKind.SCRIPT, "-odd.py", ("-x",)), ["--", "-odd.py", "-x"]),
        (Target(TargetKind.SCRIPT, "train.py", ("--", "x")), ["train.py", "--", "--", "x"]),
        (Target(TargetKind.MODULE, "pkg.mod", ("x",)), ["-m", "pkg.mod", "--", "x"]),
        (Target(TargetKind.PROGRAM, "./p"), ["--no-python", "./p"]),
    ],
)
def test_command_for_another_node(target, tail):
    made = plan(nnodes=2, nproc="2,1", master_addr="a", master_port=7, target=target)
    words = shlex.split(node_command(made, 1, ["--grace", "5"]))
    assert words == [
        *("ddplaunch", "run", "--nnodes", "2", "--node-rank", "1", "--master-addr", "a", "--master-port", "7"),
        *("--nproc", "2,1", "--grace", "5", *tail),
    ]


def test_json_has_the_fields_that_are_promised():
    made = json.loads(json.dumps(plan(GPUS, nnodes=2, bind="numa").to_json()))
    assert {"run_id", "nnodes", "world_size", "master_addr", "master_port", "target", "nodes", "ranks"} <= set(made)
    assert [set(node) for node in made["nodes"]] == [{"node_rank", "host", "local_world_size", "source"}] * 2
    assert all(
        set(rank) == {"rank", "local_rank", "node_rank", "host", "device", "cpus", "env", "argv"}
        for rank in made["ranks"]
    )
    assert made["ranks"][5]["cpus"] == [2, 3]
    assert made["ranks"][0]["argv"] == ["python", "train.py", "--lr", "1"]
