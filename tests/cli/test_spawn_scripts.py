"""Tests of scripts written for ``mp.spawn``: a note before the start, and functions that get a Namespace."""

from __future__ import annotations

import ast
import re

import pytest

from ddplaunch.system.target.signature import from_source
from ddplaunch.system.target.spawn_call import spawn_call_note
from ddplaunch.system.target.target import find_target
from tests.conftest import assert_refused, write_program

SCRIPT = """
import argparse, os
import multiprocessing as mp

RATE = 0.5

def train(rank, args):
    values = args.epochs, args.lr, args.fast, args.data, args.names
    print(rank, *values, "world", args.world_size, args.rank)

def main():
    folder = "here"
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", "-e", type=int, default=3)
    parser.add_argument("--lr", type=float, default=RATE)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--data", default=os.environ.get("NO_SUCH_VARIABLE", "none"))
    parser.add_argument("--names", nargs="+", default=[])
    parser.add_argument("--world-size", type=int, required=True)
    args = parser.parse_args()
    mp.spawn(train, args=(args,), nprocs=args.world_size)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path):
    write_program(tmp_path, "spawns.py", SCRIPT)
    return tmp_path / "spawns.py"


def test_the_options_of_a_namespace(run_ddplaunch, script):
    words = ("-e", "5", "--fast", "--names", "a", "b")
    done = run_ddplaunch("run", "--start", "exec", "--nproc", "2", "spawns.py:train", *words)
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"[{rank}] {rank} 5 0.5 True none ['a', 'b'] world 2 {rank}" for rank in range(2)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--epochs x", "spawns.py:train: argument --epochs/-e: invalid int value: 'x'"),
        ("--bad 1", "spawns.py:train: unrecognized arguments: --bad 1"),
    ],
)
def test_wrong_options_are_refused_before_the_start(run_in_fork, script, words, message):
    refused = run_in_fork("run", "spawns.py:train", *words.split())
    assert_refused(refused, message, "its options: --epochs, --lr, --fast, --data, --names, --world-size")


def test_help_lists_them(run_in_fork, script):
    assert re.search(r"--epochs( EPOCHS)?, -e EPOCHS", run_in_fork("run", "spawns.py:train", "--help").stdout)


def test_a_default_that_only_main_knows_must_be_given(run_ddplaunch, tmp_path):
    write_program(tmp_path, "spawns.py", SCRIPT.replace("default=RATE", "default=len(folder)"))
    words = ("run", "--start", "exec", "spawns.py:train")
    assert "the following arguments are required: --lr" in run_ddplaunch(*words).stderr
    assert run_ddplaunch(*words, "--lr", "2").stdout == "0 3 2.0 False none [] world 1 0\n"


@pytest.mark.parametrize(
    ("function", "namespace"),
    [
        ("def f(rank, args): pass", "args"),
        ("def f(gpu, ngpus, opt, lr=1): pass", None),
        ("def f(gpu, opt, lr=1): pass", "opt"),
        ("def f(rank, settings: argparse.Namespace): pass", "settings"),
        ("def f(rank, args: int): pass", None),
        ("def f(rank, epochs): pass", None),
        ("def f(rank, *args): pass", None),
    ],
)
def test_which_parameter_is_a_namespace(function, namespace):
    module = ast.parse(f"{function}\nparser.add_argument('--x')\n")
    assert isinstance(module.body[0], ast.FunctionDef)
    assert from_source("m.py:f", module.body[0], module).namespace == namespace
    without = ast.parse(function)
    assert from_source("m.py:f", module.body[0], without).namespace is None


def test_the_note_on_a_call_of_spawn(script):
    def note(ranks: int, text: str = "spawns.py") -> str | None:
        target = find_target(text, ("--epochs", "2"), as_module=False, as_program=False, cwd=str(script.parent))
        return spawn_call_note(target, ranks)

    assert note(1) is None
    assert note(2, "spawns.py:train") is None
    assert note(2) == (
        "spawns.py:20 calls mp.spawn: each of 2 ranks will start processes of its own. "
        "To run train in each rank: ddplaunch run --nproc 2 spawns.py:train --epochs 2; "
        "or call launch(train, nproc=2) in its place"
    )
    script.write_text(SCRIPT.replace("def train(rank,", "def train(number,"))
    assert "--epochs 2, with number renamed to rank; or" in str(note(2))
    script.write_text(SCRIPT.replace("mp.spawn(", "other.spawn("))
    assert note(2) is None
    script.write_text("from torch.multiprocessing import spawn\nspawn(f)\n")
    assert str(note(2)).startswith("spawns.py:2 calls mp.spawn")


def test_the_note_comes_before_the_start(run_in_fork, script):
    done = run_in_fork("run", "--dry-run", "--nproc", "2", "spawns.py")
    assert "spawns.py:20 calls mp.spawn" in done.stderr
    assert "mp.spawn" not in run_in_fork("run", "--dry-run", "spawns.py").stderr
