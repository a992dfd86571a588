"""A line read without click must mean what it means to click, which reads all that is not plain."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from ddplaunch.cli import quick
from ddplaunch.cli.options import OPTIONS
from ddplaunch.cli.parameters import read
from ddplaunch.cli.run_command import run
from ddplaunch.cli.target_command import remarks
from ddplaunch.errors import UsageError
from tests.conftest import write

ROOT = Path(__file__).parents[2]

VALUES = {
    "--nproc": ["4", "8,8,4", "auto", "-1", "", "x"],
    "--nnodes": ["1", "2", "2:4", "4:2", "0:1", "x", " 2"],
    "--node-rank": ["0", "auto", "-1", "1.0", "x"],
    "--master-port": ["0", "65535", "65536", "-1", "1e3"],
    "--run-id": ["a", "a b", "", "-"],
    "--control": ["tcp", "none", "TCP", "t", ""],
    "--start": ["auto", "zygote", "exec", "fork"],
    "--bind": ["numa", "none"],
    "--on-stall": ["stop", "restart", "report", "end"],
    "--restart-on": ["any", "transient", "always", "never"],
    "--grace": ["0", "2.5", "10m", "8d", "-1", "inf", "nan", "1_0"],
    "--timeout": ["90", "2h", "0", "0.5"],
    "--heartbeat-timeout": ["15", "0.1"],
    "--preempt-signal": ["none", "usr1", "SIGTERM", "KILL"],
    "--preempt-forward": ["none", "USR1"],
    "--env": ["A=1", "A", "=", "--x"],
    "--sidecar": ["true", "'", ""],
    "--prefix": ["none", "{rank}", "{nothing}", "{", ""],
    "--stdin": ["0", "x"],
    "--hosts": ["a:1,b:2", ""],
    "--hostfile": ["/proc/nowhere", "-"],
    "--log-dir": ["logs", ".", "~/x"],
    "--tensorboard": ["runs", ""],
    "--token": ["s", " ", ""],
    "--preload": ["torch", "A,B", ""],
}


def lines():
    """Each option, with good and bad values in both spellings; what is said elsewhere; lines of several options."""
    for option in OPTIONS:
        if option.is_argument:
            continue
        for name in option.opts:
            if option.is_flag:
                yield from ([name], [name, name], [f"{name}=1"], [f"{name}="], [name, "--dry-run"])
                continue
            for value in VALUES.get(name, ["a", "1", ""]):
                yield from ([name, value], [f"{name}={value}"], [name, value, name, "1"], [name, value, "--ui"])
            yield [name]
    yield from (
        [], ["--"], ["-m"], ["-h"], ["--help"], ["--help-all"], ["--nothing"], ["-n", "2"], ["-mx"], ["--np", "2"],
        ["--nproc", "2", "--", "--nproc"], ["--nproc", "--nnodes"], ["--nproc", "-m"], ["--nproc=2", "-m"],
        ["--nproc-per-node", "2"], ["--nproc_per_node=2"], ["--standalone", "--nproc-per-node=2"], ["--no_python"],
        ["--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--nnodes=2"], ["--max_restarts=3"], ["--max-restarts", "3"],
        ["--monitor-interval", "5"], ["--env", "A=1", "--env", "B=2"], ["--version"], ["--warm-up"], ["--json"],
    )  # fmt: skip


BEHIND = [
    [], ["--lr", "1"], ["--nproc", "2"], ["--dry-run"], ["--dry-run", "--json"], ["--json"], ["--", "--nproc", "2"],
    ["--help"], ["x", "--nproc", "2"], ["--log-dir", "x"], ["--nproc-per-node", "2"], ["--nnodes"], ["-m", "x"], [""],
]  # fmt: skip


def documented():
    """The lines of all pages and tests, with what their shells would make of them left as it is."""
    found = set()
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "tests").rglob("*.py")):
        for line in re.findall(r"ddplaunch run ([^`\n\"|&;#<>]+)", path.read_text()):
            try:
                found.add(tuple(shlex.split(line.rstrip(" \\"))))
            except ValueError:
                continue
    return sorted(found)


def by_click(words):
    """What click makes of it: values and remarks, or None where it says something itself."""
    try:
        with click.Context(run, info_name="run") as outer, run.make_context("run", list(words), outer) as context:
            said = remarks()
            return read(context, said.from_variables), said
    except (UsageError, click.ClickException, click.exceptions.Exit):
        return None


def compare(words):
    """Whether it was read without click, as click reads it."""
    quickly = quick.read(list(words))
    assert quickly is None or quickly == by_click(words), words
    return quickly is not None


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    write(tmp_path, "train.py", "import argparse\nargparse.ArgumentParser().add_argument('--log-dir')\n")
    monkeypatch.chdir(tmp_path)
    for name in ("DDPLAUNCH_TOKEN", "DDPLAUNCH_PREFIX", "DDPLAUNCH_LOG_JSON"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "plain"),
    [
        ({}, True),
        ({"DDPLAUNCH_TOKEN": "s", "DDPLAUNCH_PREFIX": "{rank}", "DDPLAUNCH_LOG_JSON": ""}, True),
        ({"DDPLAUNCH_TOKEN": "", "DDPLAUNCH_PREFIX": "{nothing}"}, False),
        ({"DDPLAUNCH_LOG_JSON": "1", "DDPLAUNCH_WARM": "0"}, True),
        ({"DDPLAUNCH_LOG_JSON": "yes"}, False),
        ({"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "1"}, True),
    ],
)
def test_every_option_means_what_it_means_to_click(variables, plain, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert compare(["train.py"]) is plain
    for words in lines():
        compare([*words, "train.py"])
        compare(words)  # the target is missing, or is taken for a value
    for behind in BEHIND:
        compare(["--nproc", "2", "train.py", *behind])


def test_every_documented_line_means_what_it_means_to_click():
    lines = documented()
    read = [line for line in lines if compare(line)]
    assert len(lines) > 100
    assert len(read) > len(lines) / 2


@pytest.mark.parametrize(
    "words",
    [
        "train.py",
        "--nproc 4 train.py --lr 0.1",
        "--nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --token s train.py",
        "--no-python --nproc 1 /bin/true",
        "-m --nproc=2 package.module --lr 0.1",
        "--dry-run --json --nnodes 2 --nproc 8 train.py",
        "--nproc-per-node 2 --max-restarts 3 --log-dir logs train.py",
        "--show 0 --grace 10m --ui --preload torch,numpy --start zygote train.py --nproc 2",
    ],
)
def test_what_people_type_is_plain(words):
    assert compare(shlex.split(words))
