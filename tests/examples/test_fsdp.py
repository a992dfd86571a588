"""docs/examples/fsdp.py: ranks that each hold a part, take the same steps as one that holds all, and need less."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Launch

FSDP = Path(__file__).parents[2] / "docs" / "examples" / "fsdp.py"

pytestmark = pytest.mark.timeout(400)  # several whole runs, one after the other

CALM = {"OMP_NUM_THREADS": "1"}
"""Threads that spin while they wait for each other slow each other down tenfold where tests run side by side."""

SMALL = ("--width", 64, "--layers", 2)


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)}


def held(output: str) -> tuple[float, float]:
    """The megabytes that rank 0 holds of the parameters, and of all that it trains with."""
    parameters, everything = re.search(r"holds ([\d.]+) MB", output), re.search(r"moments ([\d.]+) MB", output)
    assert parameters is not None
    assert everything is not None
    return float(parameters[1]), float(everything[1])


def test_more_ranks_hold_less_and_take_the_same_steps(launch: Launch) -> None:
    runs = {
        ranks: launch("run", FSDP, "--nproc", ranks, "--", "--steps", 3, "--width", 128, "--layers", 4, env=CALM)
        for ranks in (1, 2, 4)
    }
    assert [run.returncode for run in runs.values()] == [0, 0, 0], runs
    one = held(runs[1].stdout)
    for ranks in (2, 4):
        assert held(runs[ranks].stdout) == pytest.approx((one[0] / ranks, one[1] / ranks), abs=0.1)
        assert losses(runs[ranks].stdout) == pytest.approx(losses(runs[1].stdout), abs=1e-3)
    assert list(losses(runs[1].stdout)) == [1, 2, 3]


@pytest.mark.slow
def test_a_model_too_large_for_ddp_fits_where_it_is_divided(launch: Launch) -> None:
    whole = launch("run", FSDP, "--nproc", 2, "--", "--parallel", "ddp", "--memory", 150, "--steps", 2, env=CALM)
    assert whole.returncode == 1
    assert re.search(r"rank \d failed with RuntimeError: (.*can't allocate memory|std::bad_alloc)", whole.stderr)
    parts = launch("run", FSDP, "--nproc", 2, "--", "--memory", 150, "--steps", 2, env=CALM)
    assert parts.returncode == 0, parts.stderr
    assert list(losses(parts.stdout)) == [1, 2]


@pytest.mark.slow
def test_a_checkpoint_of_ddp_serves_two_ranks_and_then_four(launch: Launch, tmp_path: Path) -> None:
    """As if it had never been interrupted, and had had one rank all the time."""

    def run(ranks: int, steps: int, *words: str) -> dict[int, float]:
        settings = ("--steps", steps, *SMALL, *words)
        done = launch("run", FSDP, "--nproc", ranks, "--", *settings, env=CALM)
        assert done.returncode == 0, done.stderr
        return losses(done.stdout)

    kept = ("--checkpoint", str(tmp_path / "model"))
    first = run(2, 2, "--parallel", "ddp", *kept)
    second = run(2, 4, *kept)
    (tmp_path / "model" / "9").mkdir()  # of a run that was killed while it wrote
    third = run(4, 6, *kept)
    assert [list(each) for each in (first, second, third)] == [[1, 2], [3, 4], [5, 6]]
    assert {**first, **second, **third} == pytest.approx(run(1, 6), abs=1e-3)
