"""Tests that the pictures of docs/ show the packages, and what a terminal shows now; they are edited by hand."""

import re
import subprocess
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.text import Text

import ddplaunch
from tests.conftest import clean_environment, ddplaunch_command, run_in_terminal, wait_until, write_program

PACKAGE = Path(ddplaunch.__file__).parent
DOCS = PACKAGE.parent / "docs"
COLUMNS = 84

FAILURE = """\
import time

import torch
import torch.distributed as dist


def check(batch):
    if batch == 30 and rank == 2:
        raise ValueError(f"batch {batch} has no labels")


dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"rank {rank} of {dist.get_world_size()} trains on shard {rank}", flush=True)
for batch in range(40):
    check(batch)
    time.sleep(600 if batch == 30 else 0)  # the others are in no collective, whose error would race with their end
    loss = torch.tensor(1 / (batch + 1))
    dist.all_reduce(loss)
    if rank == 0 and batch in (10, 20):
        print(f"batch {batch}: loss {loss / 4:.3f}", flush=True)
"""

STACKS = """\
import time

import torch
import torch.distributed as dist


def load_batch(number):
    size = 6
    if number == 30 and rank == 2:
        print("the disk is slow", flush=True)
        time.sleep(600)
    return torch.ones(size)


def train():
    for number in range(100):
        batch = load_batch(number)
        dist.all_reduce(batch)


dist.init_process_group("gloo")
rank = dist.get_rank()
train()
"""

VARYING = re.compile(r"\[[013]\] \w+Error: |  then rank |  \d other ranks? |.* [~^]+$")
"""What ranks print that lose a peer before they are stopped, how many did, and what Python 3.13 underlines."""


def drawn(name: str) -> list[str]:
    """Return the lines of text of a picture."""
    texts = [each for each in ElementTree.parse(DOCS / name).iter() if each.tag.endswith("}text")]
    rows = groupby(texts, lambda each: each.get("y"))
    return ["".join(each.text or "" for each in row).replace("\xa0", " ").rstrip() for _, row in rows]


def essence(lines: list[str]) -> list[str]:
    """What is the same in every run: the ranks race, so the order is not."""
    return sorted(re.sub(r"\d+", "0", line) for line in lines if not VARYING.match(line))


def shown(folder: Path, *words: str, env: dict[str, str] | None = None) -> list[str]:
    """Return what a terminal shows when these words are typed, as the picture has it."""
    output = Text.from_ansi(run_in_terminal(ddplaunch_command(*words), folder, env, COLUMNS).rstrip()).plain
    lines = [f"$ ddplaunch {' '.join(words)}", *output.replace(str(folder), "/home/ada").splitlines()]
    return [line[at : at + COLUMNS].rstrip() for line in lines for at in range(0, len(line) or 1, COLUMNS)]


@pytest.mark.ci
def test_the_picture_of_a_failure_is_what_run_prints(tmp_path):
    write_program(tmp_path, "train.py", FAILURE)
    lines = shown(tmp_path, "run", "train.py", "--nproc", "4")
    assert essence(drawn("failure.svg")) == essence(lines)


@pytest.mark.ci
def test_stacks(tmp_path):
    write_program(tmp_path, "train.py", STACKS)
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    job = subprocess.Popen(
        ddplaunch_command("run", "--run-id", "night", "train.py", "--nproc", "4"),
        cwd=tmp_path,
        env=clean_environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with job:
        try:
            assert job.stdout.readline() == "[2] the disk is slow\n"
            stacks: list[str] = []

            def all_wait() -> bool:
                stacks[:] = shown(tmp_path, "stacks", "night", env=env)
                return any(line.startswith("ranks 0, 1, 3 wait in all_reduce") for line in stacks)

            wait_until(all_wait, "the three other ranks")
            assert essence(drawn("stacks.svg")) == essence(stacks)
        finally:
            job.terminate()


def test_the_layers_are_those_of_the_package():
    text = "\n".join(drawn("layers.svg"))
    features = {path.parent.name for path in PACKAGE.glob("features/*/__init__.py")}
    count, listed = re.search(r"features/ \((\d+)\)\n(.*\n.*)", text).groups()
    assert ({*re.findall(r"\w+", listed)}, int(count)) == (features, len(features))
    folders = {path.parent.name for layer in ("system", "core") for path in PACKAGE.glob(f"{layer}/*/__init__.py")}
    layers = {"features", "cli", "observe", "core", "system", "base"}
    assert {*re.findall(r"^(\w+)/", text, re.MULTILINE)} >= {*folders, *layers}


@pytest.mark.parametrize("name", sorted(path.name for path in DOCS.glob("*.svg")))
def test_the_picture_loads_nothing(name):
    found = re.findall(r"url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)", (DOCS / name).read_text())
    assert found == []
