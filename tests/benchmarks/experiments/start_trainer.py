"""A program that imports transformers: Hugging Face's Trainer on a tiny BERT, two steps."""

from tests.benchmarks.contenders import plain
from tests.benchmarks.runner import OURS, TORCHRUN, Experiment, Row, Size
from tests.benchmarks.turns import compare, run

REQUIRES = ("transformers",)
PLAIN = "one process of plain python"


def experiment(size: Size) -> Experiment:
    what = f"{size.many} ranks, Hugging Face's Trainer on a tiny BERT, 2 steps"
    turns = compare(lambda launcher: run(launcher(size.many, "hf_trainer.py")), OURS, TORCHRUN)
    return Experiment(
        {**turns, PLAIN: lambda: run(plain("hf_trainer.py"))},
        (
            Row(f"{what}: CPU", "cpu", "CPU-s", TORCHRUN),
            Row(f"{what}: the whole command", "wall", "s", PLAIN),
        ),
        rounds=3,
    )
