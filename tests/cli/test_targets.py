"""Tests of real runs of each target: a script, a module, a program, and functions."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.conftest import assert_refused, free_port, write_program
from tests.start_modes import EXEC, FORKED, LIGHT

MODES = pytest.mark.parametrize("mode", [FORKED, EXEC], ids=["zygote", "exec"])


def list_rank_lines(done) -> list[str]:
    """What the ranks of a job that ended well printed, without their prefixes, in order of the text."""
    assert done.returncode == 0, done.stderr
    return sorted(re.sub(r"^\[\d+\] ", "", line) for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        pytest.param(FORKED, "--nproc 2 train.py", marks=pytest.mark.smoke),
        (EXEC, "train.py --nproc 2"),
    ],
)
def test_a_script(run_ddplaunch, tmp_path, mode, words):
    write_program(tmp_path, "train.py", "import os, sys\nprint(__name__, os.environ['RANK'], sys.argv)\n")
    done = run_ddplaunch("run", *mode, *words.split(), "--epochs", "10", "a b", "-x")
    argv = "['train.py', '--epochs', '10', 'a b', '-x']"
    assert list_rank_lines(done) == [f"__main__ 0 {argv}", f"__main__ 1 {argv}"]


@MODES
@pytest.mark.smoke
def test_a_module_runs_as_main_with_its_package(run_ddplaunch, tmp_path, mode):
    write_program(tmp_path, "pkg/__init__.py", "print('package')\n")
    write_program(
        tmp_path, "pkg/mod.py", "import sys\nfrom . import other\nprint(__name__, __package__, sys.argv[1:])\n"
    )
    write_program(tmp_path, "pkg/other.py", "")
    done = run_ddplaunch("run", "--nproc", "2", *mode, "-m", "pkg.mod", "--lr", "1")
    assert list_rank_lines(done) == ["__main__ pkg ['--lr', '1']"] * 2 + ["package"] * 2


def test_a_module_in_a_package_without_init(run_ddplaunch, tmp_path):
    write_program(
        tmp_path, "space/inner/leaf.py", "def main(rank): print(__name__, rank)\nif __name__ == '__main__': main(7)\n"
    )
    assert list_rank_lines(run_ddplaunch("run", "-m", "space.inner.leaf")) == ["__main__ 7"]
    assert list_rank_lines(run_ddplaunch("run", "space.inner.leaf:main")) == ["space.inner.leaf 0"]


@pytest.mark.smoke
def test_a_program(run_ddplaunch, tmp_path):
    write_program(tmp_path, "prog", '#!/bin/sh\necho "rank $RANK of $WORLD_SIZE: $*"\n').chmod(0o755)
    done = run_ddplaunch("run", "--nproc", "2", "--no-python", "./prog", "--lr", "1", "--", "x")
    assert list_rank_lines(done) == ["rank 0 of 2: --lr 1 -- x", "rank 1 of 2: --lr 1 -- x"]


def test_targets_with_the_names_of_commands(run_ddplaunch, tmp_path):
    write_program(tmp_path, "run", "import sys\nprint('I am run by', sys.executable)\n")
    assert list_rank_lines(run_ddplaunch("run", "run")) == [f"I am run by {sys.executable}"]
    write_program(tmp_path, "-odd.py", "import sys\nprint(sys.argv)\n")
    assert list_rank_lines(run_ddplaunch("run", "--", "-odd.py", "--nproc", "4")) == ["['-odd.py', '--nproc', '4']"]


TUTORIAL = """
import os
import torch
import torch.distributed as dist
from torch.distributed import init_process_group, destroy_process_group


def ddp_setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "{port}"
    init_process_group(backend="gloo", rank=rank, world_size=world_size)


def main(rank: int, world_size: int, save_every: int, total_epochs: int, batch_size: int):
    ddp_setup(rank, world_size)
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    print("sum", total.item(), "of", dist.get_world_size(), "every", save_every * 10 + total_epochs, batch_size)
    destroy_process_group()


if __name__ == "__main__":
    import argparse
    import torch.multiprocessing as mp
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int)
    mp.spawn(main, args=())
"""


@pytest.mark.ci
@pytest.mark.smoke
def test_a_function_from_a_tutorial_runs_unchanged(run_ddplaunch, tmp_path):
    """The function chooses a port itself, which the launcher's store must not occupy."""
    write_program(tmp_path, "multigpu.py", TUTORIAL.replace("{port}", str(free_port())))
    done = run_ddplaunch(
        *("run", "--nproc", "2", "multigpu.py:main", "--save-every", "3", "--total_epochs", "4", "--batch-size", "32")
    )
    assert list_rank_lines(done) == ["sum 3 of 2 every 34 32"] * 2


OUT_OF_SIGHT = """
import functools
from impl import *
from impl import run as renamed

def decorate(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

@decorate
def decorated(rank: int, steps: int):
    print("rank", rank, "steps", steps)

made = functools.partial(decorated)
value = max((1, 2))
kind = type(value)
"""


@pytest.fixture
def out_of_sight(tmp_path):
    write_program(tmp_path, "fn.py", OUT_OF_SIGHT)
    write_program(tmp_path, "impl.py", "def run(rank: int, steps: int):\n    print('rank', rank, 'steps', steps)\n")


@pytest.mark.parametrize("function", ["renamed", "made"])
def test_functions_that_are_not_defined_in_the_file_are_called(run_ddplaunch, out_of_sight, function):
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", f"fn.py:{function}", "--steps", "3")
    assert list_rank_lines(done) == ["rank 0 steps 3", "rank 1 steps 3"]


@pytest.mark.parametrize(
    ("mode", "words", "message"),
    [
        (EXEC, "fn.py:decorated", "fn.py:decorated needs --steps"),
        (FORKED, "fn.py:renamed --steps x", "fn.py:renamed cannot take --steps: 'x' is not a valid integer"),
        (FORKED, "fn.py:nowhere", "fn.py has no function nowhere"),
        (EXEC, "fn.py:value", "fn.py:value is not a function: it is 2"),
        (FORKED, "fn.py:kind", "fn.py:kind is not a function: it is <class 'int'>"),
    ],
)
def test_errors_found_in_the_ranks_are_reported_once(run_ddplaunch, out_of_sight, mode, words, message):
    error = assert_refused(run_ddplaunch("run", *mode, "--nproc", "3", *words.split()))
    assert error.startswith(f"Error: {message}")
    assert len(error.splitlines()) <= 2


def test_a_click_command_reads_its_arguments_itself(run_ddplaunch, tmp_path):
    write_program(
        tmp_path,
        "cmd.py",
        """
        import click

        @click.command()
        @click.option("--lr", type=float)
        def main(lr):
            print("lr", lr)
        """,
    )
    assert list_rank_lines(run_ddplaunch("run", *LIGHT, "--nproc", "2", "cmd.py:main", "--lr", "2")) == ["lr 2.0"] * 2


PARSERS = {
    "argparse": """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--token", default="none")
        token = parser.parse_args().token
        """,
    "fields": """
        import dataclasses, sys

        @dataclasses.dataclass
        class Arguments:
            token: str = "none"

        typed = dict(zip(sys.argv[1::2], sys.argv[2::2]))
        token = Arguments(**{field.name: typed.get(f"--{field.name}") for field in dataclasses.fields(Arguments)}).token
        """,
    "nothing": """
        import sys
        token = "none"
        for name, value in zip(sys.argv[1::2], sys.argv[2::2]):
            globals()[name.lstrip("-")] = value
        """,
}
"""Programs that read ``--token``: named in quotes, as a field, not at all."""


@pytest.mark.smoke
@pytest.mark.parametrize("how", PARSERS)
def test_a_programs_own_option_is_never_swallowed(run_ddplaunch, tmp_path, how):
    """The program gets its option: silently if the file names it, else with a note."""
    write_program(tmp_path, "train.py", PARSERS[how]).open("a").write("print(token)\n")
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", "train.py", "--token", "secret")
    assert list_rank_lines(done) == ["secret", "secret"]
    note = "ddplaunch: note: --token goes to train.py; options of ddplaunch come before it\n"
    assert done.stderr == (note if how == "nothing" else "")


def test_a_dry_run_behind_a_target_says_how_to_pass_it_on(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    line = "--dry-run was read as ddplaunch's; to pass it to the program: ddplaunch run --nproc 2 train.py -- --dry-run"
    done = run_in_fork("run", "train.py", "--nproc", "2", "--dry-run")
    assert (done.stdout.splitlines()[-1], done.stderr) == (line, "")
    done = run_in_fork("run", "--nproc", "2", "train.py", "--dry-run", "--json")
    assert json.loads(done.stdout)["world_size"] == 2
    assert done.stderr == f"{line} --json\n"


def test_a_parameter_with_the_name_of_an_option(run_in_fork, tmp_path):
    """An option is refused if both ddplaunch and the function have it, and if neither has it."""
    write_program(tmp_path, "train.py", "def main(rank, nproc: int = 3, log_dir=None): pass\n")
    done = run_in_fork("run", "--dry-run", "train.py:main", "--nproc", "2")
    assert_refused(done, "--nproc could be ", "argument of train.py:main")
    assert run_in_fork("run", "--dry-run", "train.py:main", "--master-port", "4", "--log-dir", "x").returncode == 0
    done = run_in_fork("run", "--dry-run", "train.py:main", "--backend", "gloo")
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        [
            "Error: train.py:main: no such option '--backend'",
            "  its signature: main(rank, nproc: int = 3, log_dir=None)",
            "  --backend goes to train.py:main; options of ddplaunch come before it",
        ],
    )


def test_a_function_has_help(run_in_fork, tmp_path):
    write_program(
        tmp_path,
        "train.py",
        """
        raise SystemExit("it runs")
        def main(rank: int, save_every: int, lr=0.1, layers: list[int] = (1, 2), amp: bool = False, **rest):
            \"\"\"Train it.\"\"\"
        def other(rank, help=None): pass
        """,
    )
    for words in (("--help",), ("--lr", "1", "-h"), ("--", "--help")):
        done = run_in_fork("run", "--nproc", "2", "train.py:main", *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == (
            "Usage: ddplaunch run train.py:main [OPTIONS]\n\n"
            "  Train it.\n\n"
            "Options:\n"
            "  --save-every      int, required\n"
            "  --lr              = 0.1\n"
            "  --layers          list[int] = (1, 2)\n"
            "  --amp / --no-amp  bool = False\n"
            "  --NAME VALUE...\n\n"
            "Filled in by ddplaunch: rank\n"
        )
    done = run_in_fork("run", "train.py:other", "--help")
    assert done.stderr.startswith("Error: train.py:other: option '--help' requires an argument"), "its own parameter"


def test_nothing_of_a_target_runs_in_the_launcher(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "open('ran', 'w').close()\ndef main(rank): pass\n")
    for target in (["train.py"], ["train.py:main"], ["train:main"], ["-m", "train"]):
        assert run_in_fork("run", "--dry-run", *target).returncode == 0
    assert not (tmp_path / "ran").exists()
