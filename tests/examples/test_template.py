"""Tests of docs/examples/template.py: each promise in its text."""

import re
import signal
import zipfile
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, ddplaunch_command, run_command, write_program
from tests.examples.plain import EXAMPLES, ONE_THREAD, PRELOAD, run_by_python_in_turn
from tests.frameworks.launchers import requires

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TEMPLATE = EXAMPLES / "template.py"


def finished(output: str) -> str:
    (line,) = re.findall(r"finished: .*", output)
    return line


def tensors(path: Path) -> list[bytes]:
    """All tensors of a checkpoint, in order; a zip archive, read without torch."""
    with zipfile.ZipFile(path) as archive:
        parts = [name.split("/") for name in archive.namelist()]
        numbers = sorted(int(number) for *_, folder, number in parts if folder == "data" and number.isdigit())
        return [archive.read(f"{parts[0][0]}/data/{number}") for number in numbers]


@pytest.mark.ci
@requires("tensorboard")
def test_the_template_learns_and_writes_curves(run_ddplaunch, tmp_path):
    words = ("--epochs", "4", "--accumulate", "2", "--workers", "1", "--tensorboard", "curves")
    done = run_ddplaunch("run", "--nproc", "2", TEMPLATE, "--", *words, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"epoch 4: .* ([\d.]+)% right", done.stdout)[0]) > 70
    assert done.stdout.count("finished") == 1
    (events,) = (tmp_path / "curves").iterdir()
    assert b"test loss" in events.read_bytes()


@pytest.mark.ci
def test_plain_python_goes_on_or_begins_anew_accumulates_and_takes_a_model_of_ones_own(tmp_path):
    """Two runs of one epoch each are not one of two: the learning rate falls along a curve over all epochs.

    Batches that are accumulated make one step: twice 8 is 16, but for rounding; without dropout, which is another for
    each part.
    """
    write_program(
        tmp_path,
        "mine.py",
        "from torch import nn\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n",
    )
    small, net = ("--model", "mlp", "--epochs"), ("--reset", "--model", "cnn", "--epochs", "2")
    first, second, anew, whole, parts, mine = run_by_python_in_turn(
        tmp_path,
        TEMPLATE,
        (*small, "1"),
        (*small, "2"),
        (*small, "1", "--reset"),
        (*net, "--batch-size", "16"),
        (*net, "--batch-size", "8", "--accumulate", "2"),
        ("--reset", "--model", "mine:net", "--amp", "--epochs", "1", "--loss", "multi_margin_loss"),
    )
    assert "at epoch 0 step 0" in first
    assert "at epoch 1 step 0" in second
    assert "at epoch 0 step 0" in anew
    losses = [float(re.findall(r"epoch 2: loss ([\d.]+)", output)[0]) for output in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert "finished" in mine


GATED = ("--model", "mlp", "--data", "gated:data", "--epochs", "3", "--batch-size", "4", "--accumulate", "2")


@pytest.fixture
def gated(tmp_path):
    """The data of GATED, and the variables with which it is found."""
    write_program(tmp_path, "gated.py", (PROGRAMS / "gated.py").read_text())
    return {**ONE_THREAD, "PYTHONPATH": str(tmp_path)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What two ranks print in the end that train with GATED, and all tensors of their checkpoint."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_program(folder, "gated.py", (PROGRAMS / "gated.py").read_text())
    (folder / "passed").touch()
    done = run_command(
        ddplaunch_command("run", "--nproc", "2", TEMPLATE, "--", *GATED),
        folder,
        {**ONE_THREAD, "PYTHONPATH": str(folder)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return finished(done.stdout), tensors(folder / "checkpoint.pt")


@pytest.mark.ci
def test_a_run_that_made_room_in_the_middle_of_an_epoch_ends_as_an_undisturbed_one(
    start_ddplaunch, tmp_path, gated, undisturbed
):
    first = start_ddplaunch("run", "--nproc", "2", TEMPLATE, "--", *GATED, env=gated)
    first.wait_for("waits", 2)
    first.signal(signal.SIGUSR2)
    assert first.wait() == 75
    assert re.search(r"made room at epoch \d step [1-9]", first.stdout())
    again = start_ddplaunch("run", "--nproc", "2", TEMPLATE, "--", *GATED, env=gated)
    assert again.wait() == 0
    assert (finished(again.stdout()), tensors(tmp_path / "checkpoint.pt")) == undisturbed
    assert max(map(len, undisturbed[1])) == 4 * 64 * 64  # bytes of the first layer's weights


@pytest.mark.ci
def test_all_ranks_end_early_together(run_ddplaunch):
    """Nothing is learned at a learning rate of 0, so no epoch is better than the first."""
    words = ("--lr", "0", "--patience", "2", "--epochs", "50", "--model", "mlp")
    done = run_ddplaunch("run", *PRELOAD, "--nproc", "2", TEMPLATE, "--", *words, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"epoch (\d+):", done.stdout) == ["1", "2", "3"]
