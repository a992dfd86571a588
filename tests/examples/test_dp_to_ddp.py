"""docs/examples/dp_to_ddp.py: one model under one card, DataParallel and DDP, saved by each and loaded by each."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import Launch, clean_environment, torchrun

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "dp_to_ddp.py"

pytestmark = pytest.mark.timeout(400)  # several whole runs, one after the other

CALM = {"OMP_NUM_THREADS": "1"}
"""Threads that spin while they wait for each other slow each other down tenfold where tests run side by side."""


def alone(folder: Path, *words: str, under_torchrun: bool = False) -> str:
    """What the example prints, started by python, or by torchrun with two ranks."""
    done = subprocess.run(
        torchrun(folder, EXAMPLE, *words) if under_torchrun else [sys.executable, str(EXAMPLE), *words],
        cwd=folder,
        env=clean_environment(CALM),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


def first_name(path: Path) -> str:
    """The first name in a file of parameters, which is a zip archive with a pickle, read without torch."""
    with zipfile.ZipFile(path) as archive:
        (pickled,) = (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    (name, *_) = re.findall(rb"(?:module\.)?\d+\.weight", pickled)
    return str(name, "ascii")


def test_one_card_to_data_parallel_to_ddp(launch: Launch, tmp_path: Path) -> None:
    """Each goes on where the one before ended; the whole is what one card does in as many epochs."""
    first = alone(tmp_path, "--save", "model.pt", "--epochs", "2")
    second = alone(tmp_path, "--parallel", "dp", "--load", "model.pt", "--save", "dp.pt", "--wrapped", "--epochs", "2")
    assert first_name(tmp_path / "model.pt") == "0.weight"
    assert first_name(tmp_path / "dp.pt") == "module.0.weight"
    words = ("--parallel", "ddp", "--load", "dp.pt", "--save", "ddp.pt", "--epochs", 2)
    third = launch("run", EXAMPLE, "--nproc", 2, "--", *words, env=CALM)
    assert third.returncode == 0, third.stderr
    assert third.stdout.count("saved ddp.pt") == 1
    assert "whose first name is module.0.weight" in third.stdout
    assert first_name(tmp_path / "ddp.pt") == "0.weight"
    fourth = alone(tmp_path, "--load", "ddp.pt", "--epochs", "2")
    all_losses = [losses(output)[-1] for output in (first, second, third.stdout, fourth)]
    assert all_losses == sorted(all_losses, reverse=True)
    assert all_losses[-1] < all_losses[0] / 2


@pytest.mark.slow
def test_all_take_the_same_steps(launch: Launch, tmp_path: Path) -> None:
    one = losses(alone(tmp_path))
    assert len(one) == 3
    assert losses(alone(tmp_path, "--parallel", "dp")) == one
    two = launch("run", f"{EXAMPLE}:main", "--nproc", 2, "--", "--parallel", "ddp", env=CALM)
    assert losses(two.stdout) == pytest.approx(one, abs=2e-4), two.stderr


@pytest.mark.slow
def test_under_torchrun_what_ddp_saved_with_its_prefix_is_loaded_by_one(tmp_path: Path) -> None:
    alone(tmp_path, "--parallel", "ddp", "--save", "ddp.pt", "--wrapped", under_torchrun=True)
    assert first_name(tmp_path / "ddp.pt") == "module.0.weight"
    assert "loaded ddp.pt, whose first name is module.0.weight" in alone(tmp_path, "--load", "ddp.pt", "--epochs", "1")
