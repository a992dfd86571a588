"""A program that imports transformers, Hugging Face's Trainer on a tiny BERT: two steps, and its memory at rest."""

from tests.benchmarks.harness import (
    OURS,
    PLAIN,
    TORCHRUN,
    Experiment,
    Launcher,
    Row,
    Size,
    Values,
    compare,
    held,
    plain,
)
from tests.benchmarks.harness import run as run_command

REQUIRES = ("transformers",)


def experiment(size: Size) -> Experiment:
    def run(launcher: Launcher) -> Values:
        command = launcher(size.many, "hf_trainer.py")
        return {**run_command(command), **held(command, size.many)}

    what = f"{size.many} ranks, Hugging Face's Trainer on a tiny BERT, 2 steps"
    return Experiment(
        {**compare(run, OURS, TORCHRUN), PLAIN: lambda: run_command(plain("hf_trainer.py"))},
        (
            Row(f"{what}: CPU", "cpu", "CPU-s", TORCHRUN),
            Row(f"{what}: the whole command", "wall", "s", PLAIN),
            Row(f"{size.many} idle ranks of it: PSS of the whole job", "memory", "MB", TORCHRUN),
        ),
        rounds=3,
    )
