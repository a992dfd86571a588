"""Tests of docs/examples/fsdp.py: sharded ranks take the same steps as one process, with less memory.

That a model fits which is too large for DDP is run from docs/examples.md (tests/test_readme.py).
"""

import re

import pytest

from tests.examples.plain import EXAMPLES, ONE_THREAD

pytestmark = [pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(400)]

FSDP = EXAMPLES / "fsdp.py"


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)}


def held(output: str) -> tuple[float, float]:
    """The megabytes that rank 0 holds of the parameters, and of all that it trains with."""
    parameters, everything = re.search(r"holds ([\d.]+) MB", output), re.search(r"moments ([\d.]+) MB", output)
    assert parameters is not None
    assert everything is not None
    return float(parameters[1]), float(everything[1])


def test_more_ranks_hold_less_and_take_the_same_steps(run_ddplaunch, tmp_path):
    """The result is that of one uninterrupted rank, also when DDP resumes FSDP's run, and FSDP DDP's."""

    def run(ranks: int, steps: int, *words: str) -> str:
        small = ("--width", 128, "--layers", 4)
        done = run_ddplaunch("run", FSDP, "--nproc", ranks, "--", "--steps", steps, *small, *words, env=ONE_THREAD)
        assert done.returncode == 0, done.stderr
        return done.stdout

    alone = run(1, 4)
    expected, whole = losses(alone), held(alone)
    assert list(expected) == [1, 2, 3, 4]

    def check(output: str, share: int, *steps: int) -> None:
        assert held(output) == pytest.approx((whole[0] / share, whole[1] / share), abs=0.1)
        assert losses(output) == pytest.approx({step: expected[step] for step in steps}, abs=1e-3)

    kept = ("--checkpoint", str(tmp_path / "model"))
    check(run(4, 2, *kept), 4, 1, 2)
    check(run(2, 3, "--parallel", "ddp", *kept), 1, 3)
    (tmp_path / "model" / "9").mkdir()  # of a run that was killed while it wrote
    check(run(2, 4, *kept), 2, 4)
