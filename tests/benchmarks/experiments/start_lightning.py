"""A program that imports Lightning: its Trainer with DDP, four steps."""

from tests.benchmarks.harness import OURS, TORCHRUN, Experiment, Row, Size, compare, run

REQUIRES = ("lightning",)


def experiment(size: Size) -> Experiment:
    what = f"{size.few} ranks, Lightning's Trainer, 4 steps: the whole command"
    turns = compare(lambda launcher: run(launcher(size.few, "lightning_fit.py")), OURS, TORCHRUN)
    return Experiment(turns, (Row(what, "wall", "s", TORCHRUN),), rounds=3)
