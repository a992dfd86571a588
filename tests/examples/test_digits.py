"""Tests of docs/examples/digits.py: the same results with each way to start it, also without a launcher."""

import json
import re

import pytest

from tests.conftest import free_port, write_program
from tests.examples.plain import EXAMPLES, ONE_THREAD, PRELOAD, run_by_ddplaunch

pytestmark = pytest.mark.timeout(300)

DIGITS = EXAMPLES / "digits.py"

EACH_WAY = f"""
    import sys

    sys.path.insert(0, {str(EXAMPLES)!r})
    import digits

    for method in sys.argv[1:]:
        digits.main(method, epochs=2)
"""
"""The example in each of these ways, one after the other."""

TORCHVISION = """
    import os
    import time
    from pathlib import Path

    import torch
    from sklearn.datasets import load_digits


    class MNIST:
        def __init__(self, root, train=True, download=False):
            file = Path(root) / "MNIST" / "there"
            if download:
                time.sleep(0.5)  # so that one who does not wait would come before
                file.parent.mkdir(parents=True)  # which fails where two download
                file.touch()
            elif not file.exists():
                raise RuntimeError("Dataset not found. You can use download=True to download it")
            digits = load_digits()
            part = slice(None, 1500) if train else slice(1500, None)
            small = torch.tensor(digits.images[part] * 15).to(torch.uint8)
            self.data = small.repeat_interleave(3, 1).repeat_interleave(3, 2)[:, 1:, 1:]
            self.data = torch.nn.functional.pad(self.data, (2, 3, 2, 3))
            self.targets = torch.tensor(digits.target[part])
"""
"""What the example takes from torchvision, in the form in which MNIST has it, with 28 by 28 pixels."""


def figures(output: str) -> list[str]:
    """Its losses and its accuracy, as printed."""
    return re.findall(r"loss [\d.]+|held out: .*", output)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The figures of two ranks, of two epochs, by the way in which they found each other: env, tcp, file."""
    folder = tmp_path_factory.mktemp("ways")
    ways = {"env": "env://", "tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{folder}/store"}
    program = write_program(folder, "each_way.py", EACH_WAY)
    output = run_by_ddplaunch(folder, *PRELOAD, "--nproc", "2", program, "--", *ways.values())
    assert not (folder / "store").exists()
    printed = re.findall(r"2 ranks, joined by (\S+); 1437 digits(.*?held out: .*?)$", output, re.DOTALL | re.MULTILINE)
    assert [joined_by for joined_by, _ in printed] == list(ways.values())
    return dict(zip(ways, (figures(each) for _, each in printed), strict=True))


@pytest.mark.ci
@pytest.mark.slow
def test_learns_to_read_however_the_script_joins(trained):
    first, second, right = trained["env"]
    assert float(second.split()[1]) < float(first.split()[1]) / 2
    assert float(right.split()[-1]) > 0.9
    assert trained["tcp"] == trained["file"] == trained["env"]


def test_init_method_of_the_program_or_of_ddplaunch(run_in_fork):
    """As the docs show: before the target it is ours, behind it the script's."""
    for words, method in (
        (("--init-method", "file:///tmp/digits", DIGITS), True),
        ((DIGITS, "--init-method", "x"), False),
    ):
        plan = json.loads(run_in_fork("run", "--dry-run", "--json", *words).stdout)
        assert (plan["init_method"] is not None) is method


@pytest.mark.slow
@pytest.mark.ci
def test_mnist_is_downloaded_by_one_rank(run_ddplaunch, tmp_path):
    """torchvision is played: it belongs to its own torch, which is not the one tested here."""
    write_program(tmp_path, "torchvision/__init__.py", "")
    write_program(tmp_path, "torchvision/datasets.py", TORCHVISION)
    done = run_ddplaunch(
        "run", *PRELOAD, "--nproc", 2, DIGITS, "--", "--epochs", 2, "--mnist", tmp_path / "data",
        env={**ONE_THREAD, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1500 digits to train on" in done.stdout
    assert float(figures(done.stdout)[-1].split()[-1]) > 0.8
