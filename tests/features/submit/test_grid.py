"""Tests of ``submit --grid``: which runs it makes, and with which arguments."""

import shlex
import subprocess
from types import SimpleNamespace

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.features.submit.batch_job import BatchJob
from ddplaunch.features.submit.grid import expand_grid, read_axes, split_values
from tests.conftest import assert_refused, write_program


def runs(*texts, own=(), yes=False):
    return expand_grid(read_axes(None, SimpleNamespace(opts=["--grid"], name="grid"), texts), own, is_confirmed=yes)


def test_every_combination_named_by_what_differs():
    found = runs("--lr 0.1,0.2", "--seed 1,2,3")
    assert [run.name for run in found] == [f"lr={lr},seed={seed}" for lr in ("0.1", "0.2") for seed in (1, 2, 3)]
    assert found[4].arguments == ("--lr", "0.2", "--seed", "2")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("--lr=1,2", (("--lr=1",), ("--lr=2",))),
        ("optimizer.lr=1,2", (("optimizer.lr=1",), ("optimizer.lr=2",))),
        ("--shift -1, 1", (("--shift=-1",), ("--shift", "1"))),
        ("--betas '0.9,0.95',\"0.8,0.9\"", (("--betas", "0.9,0.95"), ("--betas", "0.8,0.9"))),
        (r"--text it\'s,''", (("--text", "it's"), ("--text", ""))),
        ("-n 1", (("-n", "1"),)),
    ],
)
def test_values(text, arguments):
    assert tuple(run.arguments for run in runs(text)) == arguments


@pytest.mark.parametrize("text", ["a,,b", ",a", "a,", "'a", "a b", '"a\nb"'])
def test_lists_that_are_none(text):
    with pytest.raises(ValueError, match=r"value|quot"):
        [*split_values(text)]


def test_too_many_runs_need_a_word():
    numbers = ",".join(map(str, range(51)))
    with pytest.raises(UsageError, match=r"--grid makes 51 × 2 = 102 runs") as error:
        runs(f"--seed {numbers}", "--lr 1,2")
    assert error.value.hint == "--yes submits them all; --dry-run shows the script"
    assert len(runs(f"--seed {numbers}", "--lr 1,2", yes=True)) == 102
    with pytest.raises(UsageError, match="10404 runs"):
        runs(f"--seed {numbers}", "--lr 1,2", f"--x {numbers}", "--y 1,2", yes=True)


def test_an_argument_that_the_program_has_already():
    with pytest.raises(UsageError, match="--lr is in --grid and among the arguments"):
        runs("--lr 1,2", own=["--lr=3"])


def test_a_shell_gives_each_run_its_arguments():
    grid = runs("--text 'a b',\"it's\",\\$HOME")
    job = BatchJob(["train.py"], "python", "/", "x", array="0-2", grid=grid)
    script = "\n".join([*job.grid_lines("$INDEX"), f"printf '%s\\n' {job.command_line}"])
    for index, value in enumerate(("a b", "it's", "$HOME")):
        done = subprocess.run(["bash", "-c", script], env={"INDEX": str(index)}, capture_output=True, text=True)
        assert done.stdout.splitlines() == ["train.py", "--", "--text", value], done.stderr


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--grid ''", ("--grid has an empty value",)),
        ("--grid '--lr '", ("--grid needs a value",)),
        ("--grid '--lr 1,1'", ("--grid '--lr 1,1': 1 is there twice", "name each value once")),
        ("--grid '--lr 1,2' --grid '--lr 3'", ("--grid '--lr 3': --lr has values in another --grid",)),
        ("--grid 'lr 1,2'", ("--grid 'lr 1,2': lr is not an option", "--grid '--lr 1,2'")),
        ("--grid '--lr 1,2' --array 0-3", ("--grid does not work with --array 0-3",)),
        ("--grid '--lr 1,2' --follow", ("--follow does not work with --grid: each job has its own log",)),
        ("--yes", ("--yes does nothing without --grid",)),
        ("--scheduler pbs --grid '--lr 1,2'", ("--grid does not work with --scheduler pbs",)),
    ],
)
def test_grids_that_are_refused(words, parts, run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    assert_refused(run_in_fork("submit", "--dry-run", *shlex.split(words), "train.py"), *parts)
