"""docs/examples/wine.py: trained by any number of ranks, started in any way, interrupted and resumed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Launch, clean_environment, command, torchrun, write
from tests.hosts.network import Network

WINE = Path(__file__).parents[2] / "docs" / "examples" / "wine.py"

CALM = {"OMP_NUM_THREADS": "1"}
"""Threads that spin while they wait for each other slow each other down tenfold where tests run side by side."""

LOSS = re.compile(r"epoch (\d+): loss ([\d.]+)")


def check_trained(output: str, ranks: int) -> None:
    """The model was trained by this many ranks, is the same on all, and good."""
    assert f"world of {ranks}," in output
    assert "parameters equal on all ranks: yes" in output
    accuracy = re.search(r"held-out accuracy: ([\d.]+)", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9


def last_loss(output: str) -> tuple[str, str]:
    """The last epoch shown, and its loss, as printed."""
    epoch, loss = LOSS.findall(output)[-1]
    return epoch, loss


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_trains_as_a_script(launch: Launch, ranks: int) -> None:
    done = launch("run", WINE, "--nproc", ranks, env=CALM)
    assert done.returncode == 0, done.stderr
    check_trained(done.stdout, ranks)


def test_trains_as_a_function_with_arguments(launch: Launch) -> None:
    done = launch("run", f"{WINE}:main", "--nproc", 2, "--", "--epochs", 20, "--lr", 0.05, "--batch-size", 4)
    assert done.returncode == 0, done.stderr
    check_trained(done.stdout, 2)
    assert last_loss(done.stdout)[0] == "20"


@pytest.mark.slow
def test_script_and_function_train_alike(launch: Launch) -> None:
    script = launch("run", WINE, "--nproc", 2, "--", "--epochs", 4, "--lr", 0.01)
    function = launch("run", f"{WINE}:main", "--nproc", 2, "--", "--epochs", 4, "--lr", 0.01)
    assert script.returncode == 0, script.stderr
    assert function.stdout == script.stdout


@pytest.mark.slow
def test_resumes_from_its_checkpoint_as_if_never_interrupted(launch: Launch, tmp_path: Path) -> None:
    # A loss that is far from 0 yet, so that equal figures mean something.
    settings = ("--lr", 0.0005, "--checkpoint", tmp_path / "wine.pt")
    first = launch("run", WINE, "--nproc", 2, "--", "--epochs", 3, *settings)
    assert last_loss(first.stdout)[0] == "3", first.stderr
    assert [path.name for path in tmp_path.glob("wine.pt*")] == ["wine.pt"]
    rest = launch("run", WINE, "--nproc", 2, "--", "--epochs", 8, *settings)
    whole = launch("run", WINE, "--nproc", 2, "--", "--epochs", 8, *settings[:2])
    assert "going on after epoch 3" in rest.stdout, rest.stderr
    assert "going on" not in whole.stdout
    assert last_loss(rest.stdout) == last_loss(whole.stdout)
    assert last_loss(rest.stdout)[0] == "8"


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_serves_three(launch: Launch, tmp_path: Path) -> None:
    launch("run", WINE, "--nproc", 2, "--", "--epochs", 3, "--checkpoint", tmp_path / "wine.pt")
    done = launch("run", WINE, "--nproc", 3, "--", "--epochs", 10, "--checkpoint", tmp_path / "wine.pt")
    assert "going on after epoch 3" in done.stdout, done.stderr
    check_trained(done.stdout, 3)


@pytest.mark.slow
def test_killed_while_it_writes_a_checkpoint_it_goes_on_from_the_one_before(launch: Launch, tmp_path: Path) -> None:
    program = write(
        tmp_path,
        "killed.py",
        f"""
        import os, signal, sys
        from pathlib import Path

        sys.path.insert(0, {str(WINE.parent)!r})
        import wine

        replace, written = os.replace, []

        def replace_or_die(*paths):
            if "0" == os.environ["TORCHELASTIC_RESTART_COUNT"] and len(written) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*paths)
            written.append(paths)

        os.replace = replace_or_die
        wine.main(epochs=20, checkpoint=Path("wine.pt"))
        """,
    )
    done = launch("run", program, "--nproc", 2, "--max-restarts", 1)
    assert done.returncode == 0, done.stderr
    assert "rank 0 was ended by SIGKILL" in done.stderr
    assert "going on after epoch 4" in done.stdout
    check_trained(done.stdout, 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_trains_without_us(ranks: int, tmp_path: Path) -> None:
    """Plain python is a world of one, torchrun whatever it says: nothing in the example is ddplaunch's."""
    done = subprocess.run(
        [sys.executable, str(WINE)] if ranks == 1 else torchrun(tmp_path, WINE),
        cwd=tmp_path,
        env=clean_environment(CALM),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    check_trained(done.stdout, ranks)


def figures(output: str) -> list[str]:
    """Its losses and its accuracy, as printed, without a prefix."""
    return re.findall(r"(?:epoch|held-out|parameters|world).*", output)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_nodes_train_as_one_does(launch: Launch, network: Callable[..., Network], tmp_path: Path) -> None:
    """The same ranks in another place: the same figures, to the last digit."""
    words = ("--nnodes", "2", "--master-addr", "n0", "--nproc", "1", "--master-port", "29500")
    nodes = [
        host.start(
            command("run", WINE, *words, "--node-rank", str(host.number)),
            cwd=tmp_path,
            env=clean_environment(CALM),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in network(2).hosts
    ]
    said = [node.communicate(timeout=100)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    check_trained(said[0], 2)
    assert figures(said[0]) == figures(launch("run", WINE, "--nproc", 2, env=CALM).stdout)
    assert figures(said[1]) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_slurm_trains_as_one_node_does(launch: Launch, slurm: Callable[..., Any]) -> None:
    cluster = slurm(2)
    job = cluster.login.start(
        command("submit", WINE, "--nodes", "2", "--follow"),
        cwd=cluster.folder,
        env={**clean_environment(CALM), **cluster.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = job.communicate(timeout=200)
    assert job.returncode == 0, err
    check_trained(out, 2)
    assert figures(out) == figures(launch("run", WINE, "--nproc", 2, env=CALM).stdout)
