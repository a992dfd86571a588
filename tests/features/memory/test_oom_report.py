"""Tests of ``--oom-report``: the report of a rank that runs out of CUDA memory, with a stand-in for torch."""

import os
import pickle
import re
import shutil
from collections.abc import Callable

import pytest

from tests.conftest import PROGRAMS, assert_refused, write_program
from tests.start_modes import EXEC

FORKED = ("--preload", "torch")
FAKE = PROGRAMS / "cuda-packages"

PROGRAM = """
    import sys
    assert sys.argv[1:] == ["forked"] or "torch" not in sys.modules, "torch was imported before the program did"
    import torch
    assert not torch.cuda.recording, "CUDA was started before the program did"

    def attention():
        torch.cuda.allocate(16 << 30)

    torch.cuda.init()
    for _ in range(3):
        attention()
    torch.cuda.allocate(2 << 30, python=False)
    torch.cuda.allocate(1 << 20)
    torch.cuda.allocate(30 << 30)
    """


@pytest.fixture
def cuda(run_ddplaunch) -> Callable[..., object]:
    """Run a program whose torch is the stand-in, built for CUDA."""

    def run(*words, packages=FAKE):
        return run_ddplaunch("run", "--oom-report", "--nproc", "2", *words, env={"PYTHONPATH": str(packages)})

    return run


@pytest.mark.parametrize(
    ("mode", "function", "folder"),
    [(FORKED, "allocate", "."), ((*EXEC, "--log-dir", "logs"), "backward", "logs/job")],
    ids=["zygote", "exec, with a log folder"],
)
def test_the_rank_the_largest_blocks_and_the_snapshot_are_named(cuda, tmp_path, mode, function, folder):
    program = write_program(tmp_path, "train.py", PROGRAM.replace("allocate(30 << 30)", f"{function}(30 << 30)"))
    done = cuda(*mode, "--run-id", "job", "--show", "none", program, *(["forked"] if mode == FORKED else []))
    assert done.returncode == 1
    rank = re.findall(r"^ddplaunch: rank (\d) failed with \S*OutOfMemoryError: CUDA", done.stderr, re.MULTILINE)[0]
    where, largest, kept = (line.strip() for line in done.stderr.splitlines()[1:4])
    assert where == (
        f"rank {rank} requested 30.0 GiB on cuda:0 (29.0 GiB of 79.0 GiB free); "
        "its tensors use 50.0 GiB; at train.py:14"
    )
    assert largest == (
        "largest by line: 48.0 GiB in 3 by train.py:7 (attention), 2.0 GiB in 1 by backward or library code, "
        "1 MiB in 1 by train.py:13 (<module>)"
    )
    label, _, path = kept.rpartition(" ")
    path = tmp_path / path
    assert (label, path.parent) == ("snapshot, for https://pytorch.org/memory_viz:", tmp_path / folder)
    with open(path, "rb") as file:
        assert len(pickle.load(file)["segments"][0]["blocks"]) == 5
    assert path.stat().st_mode & 0o777 == 0o600
    assert not [name for name in os.listdir(path.parent) if re.search(r"pickle\.\d+$", name)]


def test_a_program_that_catches_the_error_continues(cuda, tmp_path):
    program = """
        import os, time, torch

        torch.cuda.init()
        for size in (100, 50, 20):
            try:
                torch.cuda.allocate(size << 30)
                break
            except torch.OutOfMemoryError:
                pass
        print("size", size, flush=True)
        open("printed" + os.environ["RANK"], "w").close()
        while not (os.path.exists("printed0") and os.path.exists("printed1")):  # the first failure stops the other rank
            time.sleep(0.01)
        raise ValueError("of another kind")
        """
    done = cuda(*EXEC, write_program(tmp_path, "train.py", program))
    assert done.stdout.count("size 50") == 2
    assert "failed with ValueError: of another kind" in done.stderr
    assert "cuda:0" not in done.stderr
    assert len(list(tmp_path.glob("*.oom.pickle"))) == 2


def test_a_snapshot_that_cannot_be_written(cuda, tmp_path):
    for rank in range(2):
        (tmp_path / f"job.rank-{rank}.oom.pickle").mkdir()
    done = cuda(*EXEC, "--run-id", "job", write_program(tmp_path, "train.py", PROGRAM))
    assert "largest by line: 48.0 GiB in 3 by train.py:7" in done.stderr
    assert re.search(r"cannot write the snapshot to \S*/job.rank-\d.oom.pickle: Is a directory", done.stderr)
    assert not list(tmp_path.glob("*.pickle.*"))


def test_a_torch_without_an_observer_is_named_as_cuda_starts(cuda, tmp_path):
    packages = shutil.copytree(FAKE, tmp_path / "old-packages")
    (packages / "torch" / "_C.py").write_text("")
    done = cuda(*EXEC, write_program(tmp_path, "train.py", PROGRAM), packages=packages)
    # Of two ranks that fail, one may be stopped before it says so.
    assert re.search(r"--oom-report does not work on rank [01]: AttributeError: module 'torch._C' has no", done.stderr)
    assert "OutOfMemoryError" in done.stderr


def test_oom_report_is_refused_without_cuda(run_in_fork, tmp_path):
    program = write_program(tmp_path, "train.py", "")
    write_program(tmp_path / "modules/torch", "__init__.py", "")
    write_program(tmp_path / "modules/torch", "version.py", "__version__ = '2.13.0+cpu'\ncuda = None\n")
    done = run_in_fork("run", "--oom-report", program, env={"PYTHONPATH": str(tmp_path / "modules")})
    assert_refused(done, "--oom-report needs a torch for CUDA or ROCm; this is torch 2.13.0+cpu, for CPUs only")
    assert_refused(run_in_fork("run", "--oom-report", "--no-python", "true"), "--oom-report works only with Python")


@pytest.mark.ci
def test_the_stand_in_has_the_names_of_torch():
    """The names are those of torch/cuda/__init__.py of torch 2.13."""
    import torch

    assert callable(torch.cuda._lazy_call)
    assert callable(torch.cuda.memory._snapshot)
    assert {"context", "stacks", "max_entries"} <= set(
        torch.cuda.memory._record_memory_history_impl.__code__.co_varnames
    )
