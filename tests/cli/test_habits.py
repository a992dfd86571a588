"""Tests of what people type by habit: names of other programs' options and targets, and what they see then."""

from __future__ import annotations

import json
import shutil
import subprocess

import click
import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Option
from ddplaunch.cli import click_commands
from ddplaunch.cli.failure_text import render_verdict
from ddplaunch.core.failures import RankFailure, find_first_cause
from ddplaunch.core.output.log_message import LogMessage, MessageFormatter, MessageKind
from tests.conftest import assert_refused, ddplaunch_command, write_program


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("run train.py::main", "no such script: train.py::main", "did you mean train.py:main?"),
        ("run train.main", "no such script: train.main", "did you mean train.py:main?"),
        ("run -q train.py", "no such option: -q", "--show none hides"),
        ("run -v train.py", "no such option: -v", "--dry-run shows the plan"),
        ("run -", "a program cannot be read from stdin", "write it to a file"),
        ("run --gpus 2 train.py", "--gpus 2: no GPU was found", "for 2 ranks: --nproc 2"),
        ("run --nproc 2 --nnodes 2:4 --show last train.py", "the last rank changes with the number of", "local:last"),
        ("completion", "completion needs bash, zsh or fish\n", "completion --help"),
    ],
)
def test_hints(run_in_fork, tmp_path, line, message, hint):
    write_program(tmp_path, "train.py", "def main(): pass\n")
    assert_refused(run_in_fork(*line.split()), message, hint)


def test_a_missing_argument_is_named_with_each_version_of_click(monkeypatch):
    """``make_metavar`` takes the context since click 8.2."""
    monkeypatch.setattr(click.Argument, "make_metavar", lambda self: self.human_readable_name)
    monkeypatch.setattr(click_commands, "cli", click.Command("show", params=[click.Argument(["run"])]))
    with pytest.raises(UsageError) as refused:
        click_commands.run_with_click([])
    assert refused.value.message == "ddplaunch needs RUN"


def test_ps_takes_a_for_all(run_in_fork):
    assert run_in_fork("ps", "-a").returncode == 0


def test_show_last(run_ddplaunch, tmp_path):
    write_program(tmp_path, "rank.py", "import os; print('rank', os.environ['RANK'])\n")
    words = ("--start", "exec", "--nproc", "3", "--show", "last", "rank.py")
    assert run_ddplaunch("run", *words).stdout == "[2] rank 2\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(15.0, "15s"), (600.0, "10m"), (3600.0, "1h"), (90.0, "90s"), (0.0, "0s")]
)
def test_defaults_have_units(seconds, text):
    option = Option("--wait TIME", read=lambda option, given: given, name="wait", default=seconds)
    assert option.to_click().default == text


def test_help_shows_defaults_with_units(run_in_fork):
    shown = " ".join(run_in_fork("run", "--help-all").stdout.split())
    assert "How long to wait for all nodes. [default: 10m]" in shown
    assert "without a heartbeat. [default: 15s]" in shown


def test_an_error_of_argparse_is_printed_once():
    tail = ("usage: train.py [-h] [--lr LR]", "train.py: error: unrecognized arguments: --bad 3")
    failure = RankFailure(0, 0, "n0", 7, 0, 2, None, None, None, 1.0, None, tail=tail)
    verdict = find_first_cause([failure], 1, 2)
    assert "unrecognized" in render_verdict(verdict, 1)
    assert "unrecognized" not in render_verdict(verdict, 1, was_shown=True)
    other = RankFailure(0, 0, "n0", 7, 0, 2, None, None, None, 1.0, None, tail=("loss: nan",))
    assert "loss: nan" in render_verdict(find_first_cause([other], 1, 2), 1, was_shown=True)


def test_messages_in_json_keep_letters():
    formatter = MessageFormatter()
    formatter.as_json = True
    line = formatter.format(LogMessage(MessageKind.NOTE, "训练 \udcff", {}))
    assert "训练" in line
    assert line.isprintable() is False
    assert json.loads(line)["text"] == "训练 \udcff"


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_completion_in_a_bare_zsh():
    """Without ``compinit``, as in a ~/.zshrc that nobody has written to."""
    script = subprocess.run(ddplaunch_command("completion", "zsh"), capture_output=True, text=True, check=True).stdout
    done = subprocess.run(
        ["zsh", "-f"], input=f"{script}\nprint -r -- $_comps[ddplaunch]\n", capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("_ddplaunch_completion\n", "")


def test_clean_says_that_there_is_nothing(run_in_fork, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = run_in_fork("clean", "--dry-run")
    assert (done.stdout, done.stderr) == ("", "nothing to delete\n")
