"""Tests of docs/examples/wine.py: any number of ranks, each way to start it, interrupted and resumed."""

import re

import pytest

from tests.conftest import write_program
from tests.examples.plain import EXAMPLES, ONE_THREAD, PRELOAD, run_by_ddplaunch, run_by_python, run_by_torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WINE = EXAMPLES / "wine.py"

SETTINGS = ("--epochs", "8", "--lr", "0.002", "--batch-size", "4")
"""They end with a good model, and with a loss that is far from 0 yet, so that equal figures mean something."""


def check_trained(output: str, ranks: int) -> None:
    """The model was trained by this many ranks, is the same on all, and good."""
    assert f"world of {ranks}," in output
    assert "parameters equal on all ranks: yes" in output
    accuracy = re.search(r"held-out accuracy: ([\d.]+)", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9


def figures(output: str) -> list[str]:
    """Its losses and its accuracy, as printed, without a prefix."""
    return re.findall(r"(?:epoch|held-out|parameters|world).*", output)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What two ranks on one node print, which run the script with SETTINGS."""
    return run_by_ddplaunch(tmp_path_factory.mktemp("trained"), WINE, "--nproc", "2", "--", *SETTINGS)


@pytest.mark.ci
def test_trains_as_a_script(trained):
    check_trained(trained, 2)
    assert re.search(r"epoch 8: loss 0\.0[1-9]", trained)


@pytest.mark.ci
def test_trains_as_a_function_with_arguments(run_ddplaunch, trained):
    done = run_ddplaunch("run", f"{WINE}:main", "--nproc", 2, "--", *SETTINGS, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert done.stdout == trained


@pytest.mark.ci
def test_one_rank_trains_as_plain_python_does(run_ddplaunch, tmp_path):
    done = run_ddplaunch("run", WINE, "--nproc", 1, "--", *SETTINGS, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    check_trained(done.stdout, 1)
    assert figures(run_by_python(tmp_path, WINE, *SETTINGS)) == figures(done.stdout)


@pytest.mark.ci
def test_trains_under_torchrun_as_under_us(trained, tmp_path):
    """Nothing in the examples is ddplaunch's.

    Each has a torchrun of its own: in one store, gloo may find the addresses of the groups before.
    """
    wine = run_by_torchrun(tmp_path, WINE, *SETTINGS)
    template = run_by_torchrun(tmp_path, EXAMPLES / "template.py", "--epochs", "1", "--model", "mlp")
    assert figures(wine) == figures(trained)
    assert "2 ranks, rank 0 on cpu" in template
    assert "finished" in template


@pytest.mark.ci
def test_killed_during_a_checkpoint_it_resumes(run_ddplaunch, trained, tmp_path):
    """From the one before, of epoch 1; that one, of two ranks, serves three as well."""
    program = write_program(
        tmp_path,
        "killed.py",
        f"""
        import os, shutil, signal, sys
        from pathlib import Path

        sys.path.insert(0, {str(WINE.parent)!r})
        import wine

        replace, written = os.replace, []

        def replace_or_die(*paths):
            if "0" == os.environ["TORCHELASTIC_RESTART_COUNT"] and written:
                shutil.copy("wine.pt", "first.pt")
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*paths)
            written.append(paths)

        os.replace = replace_or_die
        wine.main(epochs=8, lr=0.002, batch_size=4, checkpoint=Path("wine.pt"))
        """,
    )
    done = run_ddplaunch("run", *PRELOAD, "--nproc", 2, "--max-restarts", 1, program, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert "rank 0 was ended by SIGKILL" in done.stderr
    assert "going on" not in trained
    world, *rest = figures(trained)
    assert figures(done.stdout)[-4:] == [f"{world}, going on after epoch 1", *rest]
    assert [path.name for path in tmp_path.glob("wine.pt*")] == ["wine.pt"]

    done = run_ddplaunch(
        "run", *PRELOAD, "--nproc", 3, WINE, "--", "--epochs", 12, "--checkpoint", "first.pt", env=ONE_THREAD
    )
    assert done.returncode == 0, done.stderr
    assert "world of 3, rank 0 on cpu, going on after epoch 1\n" in done.stdout
    check_trained(done.stdout, 3)
