"""Tests of docs/examples/dp_to_ddp.py: one model on one GPU, in DataParallel and in DDP, with the same checkpoints."""

import re
import zipfile
from pathlib import Path

import pytest

from tests.examples.plain import EXAMPLES, ONE_THREAD, python_in_turn, run_by_torchrun

pytestmark = [pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(400)]

EXAMPLE = EXAMPLES / "dp_to_ddp.py"


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


def first_name(path: Path) -> str:
    """The first name in a file of parameters, which is a zip archive with a pickle, read without torch."""
    with zipfile.ZipFile(path) as archive:
        (pickled,) = (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    (name, *_) = re.findall(rb"(?:module\.)?\d+\.weight", pickled)
    return str(name, "ascii")


def test_one_card_to_data_parallel_to_ddp(run_ddplaunch, tmp_path):
    """Each program continues from the previous one's checkpoint, with the steps that one card would take."""
    with python_in_turn(tmp_path, EXAMPLE) as python:
        check_each(run_ddplaunch, tmp_path, python)


def check_each(run_ddplaunch, tmp_path, python):
    short = ("--epochs", "2")
    first = python("--save", "model.pt", *short)
    second = python("--parallel", "dp", "--load", "model.pt", "--save", "dp.pt", "--wrapped", *short)
    instead = python("--load", "dp.pt", *short)
    whole, in_parallel = python(), python("--parallel", "dp")
    assert first_name(tmp_path / "model.pt") == "0.weight"
    assert first_name(tmp_path / "dp.pt") == "module.0.weight"
    assert losses(in_parallel) == losses(whole)
    assert len(losses(whole)) == 3

    # As a function here, as a script under torchrun.
    words = ("--parallel", "ddp", "--load-from", "dp.pt", "--save-to", "ddp.pt", *short)
    ours = run_ddplaunch("run", f"{EXAMPLE}:main", "--nproc", 2, "--", *words, env=ONE_THREAD)
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.count("saved ddp.pt") == 1
    assert "whose first name is module.0.weight" in ours.stdout
    assert first_name(tmp_path / "ddp.pt") == "0.weight"
    words = ("--parallel", "ddp", "--load", "dp.pt", "--save", "wrapped.pt", "--wrapped", *short)
    theirs = run_by_torchrun(tmp_path, EXAMPLE, *words)
    assert first_name(tmp_path / "wrapped.pt") == "module.0.weight"
    assert losses(ours.stdout) == losses(theirs) == pytest.approx(losses(instead), abs=2e-4)

    last, again = python("--load", "ddp.pt", *short), python("--load", "wrapped.pt", *short)
    assert "loaded wrapped.pt, whose first name is module.0.weight" in again
    assert losses(last) == losses(again)
    all_losses = [losses(output)[-1] for output in (first, second, ours.stdout, last)]
    assert all_losses == sorted(all_losses, reverse=True)
    assert all_losses[-1] < all_losses[0] / 2
