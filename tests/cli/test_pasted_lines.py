"""Tests of whole command lines of other launchers after ``ddplaunch run``: the error shows the line to type."""

from __future__ import annotations

import shlex

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.run_options import PARAMS
from ddplaunch.cli.target_args import check_not_pasted
from ddplaunch.cli.target_command import spellings
from tests.conftest import write_program

TORCHRUN = "this is a command line of torchrun"
NODES = "--num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 29500"
RENDEZVOUS = "--nnodes 2 --rdzv_id 3 --rdzv_backend c10d --rdzv_endpoint n0:29500"


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("torchrun --nproc_per_node 2 train.py --lr 3", "--nproc 2 train.py --lr 3"),
        ("torchrun --nproc-per-node=gpu -m pkg.train", "--nproc gpu --module pkg.train"),
        ("torchrun --nnodes=2 --node_rank=1 --master_addr=n0 t.py", "--nnodes 2 --node-rank 1 --master-addr n0 t.py"),
        ("-m torch.distributed.run --nproc_per_node 2 train.py", "--nproc 2 train.py"),
        ("--max-restarts 3 torchrun --nproc_per_node 2 train.py", "--max-restarts 3 --nproc 2 train.py"),
        ("python3 -m torch.distributed.run --nproc_per_node 2 train.py", "--nproc 2 train.py"),
        ("python -u -m torch.distributed.launch --nproc_per_node 2 t.py", "--nproc 2 --pass-local-rank t.py"),
        ("python -m torch.distributed.launch --use_env --nproc_per_node 2 t.py", "--nproc 2 t.py"),
        ("python train.py --lr 3", "train.py --lr 3"),
        ("-- /usr/bin/python3.11 -m pkg.train", "-m pkg.train"),
        ("accelerate launch --multi_gpu --num_processes 2 train.py", "--nproc 2 train.py"),
        (f"accelerate launch --num_processes 16 {NODES} t.py",
         "--nproc 8 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 t.py"),
        ("accelerate launch --gpu_ids 0,2 -m pkg.train", "--gpus 0,2 -m pkg.train"),
        ("accelerate launch --cpu --num_processes 4 t.py",
         "ACCELERATE_USE_CPU=true ddplaunch run --nproc 4 --gpus none t.py"),
        ("accelerate launch --mixed_precision bf16 --num_cpu_threads_per_process 4 t.py",
         "ACCELERATE_MIXED_PRECISION=bf16 OMP_NUM_THREADS=4 ddplaunch run t.py"),
        ("accelerate launch --use_fsdp --fsdp_sharding_strategy FULL_SHARD t.py",
         "FSDP_SHARDING_STRATEGY=FULL_SHARD ACCELERATE_USE_FSDP=true ddplaunch run t.py"),
        ("deepspeed --num_gpus 2 train.py --deepspeed ds.json", "--nproc 2 train.py --deepspeed ds.json"),
        ("deepspeed --include localhost:0,1 train.py", "--gpus 0,1 train.py"),
        ("deepspeed --num_gpus 2 local_rank.py", "--nproc 2 --pass-local-rank local_rank.py"),
        ("deepspeed --no_local_rank --num_gpus 2 local_rank.py", "--nproc 2 local_rank.py"),
        ("deepspeed -H hosts -i n1@n2:0,2 --master_port 3 t.py",
         "--hostfile hosts --include n1@n2:0,2 --master-port 3 t.py"),
        ("deepspeed --no_ssh --num_nodes 2 --node_rank 1 --master_addr n0 t.py",
         "--nnodes 2 --node-rank 1 --master-addr n0 t.py"),
        ("mpirun -np 4 -H a:2,b:2 -x FOO python train.py", "--hosts a:2,b:2 --env FOO train.py"),
        ("mpirun -np 3 -H a:2,b:2 python -u -m pkg.train", "--hosts a:2,b:1 -m pkg.train"),
        ("mpirun --allow-run-as-root -np 8 --host a,b python t.py", "--hosts a:4,b:4 t.py"),
        ("mpirun -n4 -x FOO=1 -x BAR python t.py", "FOO=1 ddplaunch run --nproc 4 t.py"),
        ("mpirun -np 4 ./prog x", "--nproc 4 --no-python ./prog x"),
        ("mpirun --hostfile hosts --map-by ppr:4:node --bind-to numa python t.py",
         "--nproc 4 --hostfile hosts --bind numa t.py"),
        (f"mpirun -np 2 -H a,b torchrun --nproc_per_node 4 {RENDEZVOUS} t.py", "--hosts a:1,b:1 --nproc 4 t.py"),
        ("horovodrun -np 4 -H localhost:4 python t.py", "--nproc 4 t.py"),
        ("mpiexec -n 4 -genv FOO 1 python t.py", "FOO=1 ddplaunch run --nproc 4 t.py"),
        (f"srun -N2 torchrun --nproc_per_node 2 {RENDEZVOUS} t.py", "srun -N2 ddplaunch run --nproc 2 t.py"),
        ("srun --ntasks 8 python train.py", "srun --ntasks 8 ddplaunch run train.py"),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node=2 t.py",
         "CUDA_VISIBLE_DEVICES=0,1 ddplaunch run --nproc 2 t.py"),
        ("env A=1 python t.py", "A=1 ddplaunch run t.py"),
        ("--num_processes 16 --num_machines 2 t.py", "--nproc 8 --nnodes 2 t.py"),
        ("--num_gpus 2 t.py", "--nproc 2 t.py"),
        ("torchrun --rdzv_id a/b --nproc_per_node 2 t.py", "--nproc 2 --run-id a-b t.py"),
        ("-np 4 t.py", "--nproc 4 t.py"),
    ],
)  # fmt: skip
def test_the_line_to_type(line, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_program(tmp_path, "local_rank.py", "parser.add_argument('--local_rank', type=int)\n")
    with pytest.raises(UsageError) as refused:
        check_not_pasted(shlex.split(line), spellings(PARAMS))
    expected = typed if "ddplaunch run" in typed else f"ddplaunch run {typed}"
    assert refused.value.hint == f"type: {expected}"


@pytest.mark.parametrize(
    ("line", "left_out"),
    [
        ("torchrun --foo 3 --bar --nproc_per_node 2 t.py", "--foo 3, --bar"),
        ("torchrun --monitor-interval 3 --nproc_per_node 2 t.py", "--monitor-interval 3"),
        ("accelerate launch --config_file a.yaml --num_processes 2 t.py", "--config_file a.yaml"),
        ("deepspeed --autotuning run --num_gpus 2 t.py", "--autotuning run"),
        ("mpirun -np 2 -mca btl ^tcp --new-option=1 python -O t.py", "-mca btl ^tcp, --new-option=1, -O"),
    ],
)
def test_options_without_an_equivalent_are_named(line, left_out):
    with pytest.raises(UsageError) as refused:
        check_not_pasted(shlex.split(line), spellings(PARAMS))
    assert refused.value.hint == f"type: ddplaunch run --nproc 2 t.py\nno equivalent, left out: {left_out}"


@pytest.mark.parametrize(
    "line", ["torchrun", "python", "train.py python x.py", "--no-python torchrun t.py", "-m pkg x"]
)
def test_targets_that_are_no_line_of_another_launcher(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torchrun").write_text("print()")
    check_not_pasted(shlex.split(line), spellings(PARAMS))


@pytest.mark.parametrize("line", ["srun --ntasks=2 ./job.sh", "srun hostname", "-- srun -N 2 -o out.txt prog x"])
def test_the_program_of_srun_is_not_guessed(line):
    with pytest.raises(UsageError) as refused:
        check_not_pasted(shlex.split(line), spellings(PARAMS))
    assert refused.value.message == "this is a command line of srun"
    assert refused.value.hint == "srun and its options come before ddplaunch run: name the script after ddplaunch run"


@pytest.mark.parametrize("line", ["python -c x", "python -uc 'x = 1'", "srun -N2 python -cx y", "mpirun python -c x"])
def test_code_on_the_command_line_is_no_script(line):
    with pytest.raises(UsageError) as refused:
        check_not_pasted(shlex.split(line), spellings(PARAMS))
    assert (refused.value.message, refused.value.hint) == ("python -c is not a script: ddplaunch starts Python", None)


def test_ranks_of_unequal_machines():
    with pytest.raises(
        UsageError, match="--num_processes 15 on --num_machines 2: accelerate counts the processes of all"
    ):
        check_not_pasted(shlex.split("accelerate launch --num_processes 15 --num_machines 2 t.py"), spellings(PARAMS))


def test_what_the_user_sees(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "print('started')")
    for words in (("run",), (), ("submit",)):
        done = run_in_fork(*words, "torchrun", "--nproc_per_node", "2", "train.py")
        command = words[0] if words else "run"
        said = f"Error: {TORCHRUN}\n  type: ddplaunch {command} --nproc 2 train.py\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    for name in ("accelerate-launch", "accelerate launch", "python3.11", "ipython", "mpiexec", "horovodrun", "srun"):
        said = run_in_fork(*name.split(), "train.py").stderr
        assert f"\n  type: {'srun ' * (name == 'srun')}ddplaunch run train.py\n" in said, said
    done = run_in_fork("run", "--include", "localhost:0,1", "train.py")
    assert "GPUs of this machine: --gpus 0,1" in done.stderr
