"""docs/examples/template.py: what it promises to those who copy it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ddplaunch
from tests.conftest import PROGRAMS, clean_environment, torchrun, write

TEMPLATE = Path(ddplaunch.__file__).parents[1] / "docs" / "examples" / "template.py"


def finished(output: str) -> str:
    (line,) = re.findall(r"finished: .*", output)
    return line


def alone(folder: Path, *words: str) -> str:
    """Run it without any launcher."""
    done = subprocess.run(
        [sys.executable, TEMPLATE, *words],
        cwd=folder,
        env=clean_environment({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_learns_on_two_ranks_with_curves(launch, tmp_path):
    words = ("--epochs", "4", "--accumulate", "2", "--workers", "1", "--tensorboard", "curves")
    done = launch("run", "--nproc", "2", TEMPLATE, "--", *words)
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"epoch 4: .* ([\d.]+)% right", done.stdout)[0]) > 70
    assert done.stdout.count("finished") == 1
    (events,) = (tmp_path / "curves").iterdir()
    assert b"test loss" in events.read_bytes()


def test_it_goes_on_from_its_checkpoint_or_begins_anew(tmp_path):
    """Two runs of one epoch each are not one of two: the learning rate falls along a curve over all epochs."""
    assert "at epoch 0 step 0" in alone(tmp_path, "--epochs", "1", "--model", "mlp")
    assert "at epoch 1 step 0" in alone(tmp_path, "--epochs", "2", "--model", "mlp")
    assert "at epoch 0 step 0" in alone(tmp_path, "--epochs", "1", "--model", "mlp", "--reset")


def test_a_run_that_made_room_in_the_middle_of_an_epoch_ends_as_an_undisturbed_one(start, tmp_path):
    write(tmp_path, "gated.py", (PROGRAMS / "gated.py").read_text())
    words = ("--model", "mlp", "--data", "gated:data", "--epochs", "3", "--batch-size", "4", "--accumulate", "2")
    environment = {"PYTHONPATH": str(tmp_path)}
    first = start("run", "--nproc", "2", TEMPLATE, "--", *words, env=environment)
    first.wait_for("waits", 2)
    first.signal(signal.SIGUSR2)
    assert first.wait() == 75
    assert re.search(r"made room at epoch \d step [1-9]", first.stdout())
    again, other = (
        start("run", "--nproc", "2", TEMPLATE, "--", *words, *more, env=environment)
        for more in ([], ["--checkpoint", "undisturbed.pt"])
    )
    assert (again.wait(), other.wait()) == (0, 0)
    assert finished(again.stdout()) == finished(other.stdout())
    models = [torch.load(tmp_path / name, weights_only=True)["model"] for name in ("checkpoint.pt", "undisturbed.pt")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_all_ranks_end_early_together(launch):
    """Nothing is learned at a learning rate of 0, so no epoch is better than the first."""
    done = launch(
        "run", "--nproc", "2", TEMPLATE, "--", "--lr", "0", "--patience", "2", "--epochs", "50", "--model", "mlp"
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"epoch (\d+):", done.stdout) == ["1", "2", "3"]


def test_batches_that_are_accumulated_make_one_step(tmp_path):
    """Twice 8 is 16, but for rounding; without dropout, which is another for each part."""
    losses = []
    for words in (["--batch-size", "16"], ["--batch-size", "8", "--accumulate", "2"]):
        said = alone(tmp_path, "--reset", "--model", "cnn", "--epochs", "2", *words)
        losses.append(float(re.findall(r"epoch 2: loss ([\d.]+)", said)[0]))
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


def test_a_model_of_ones_own_in_half_precision(tmp_path):
    write(
        tmp_path,
        "mine.py",
        "from torch import nn\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n",
    )
    said = alone(tmp_path, "--model", "mine:net", "--amp", "--epochs", "1", "--loss", "multi_margin_loss")
    assert "finished" in said


def test_under_torchrun(tmp_path):
    done = subprocess.run(
        torchrun(tmp_path, TEMPLATE, "--epochs", "1"),
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks, rank 0 on cpu" in done.stdout
