"""The shortest training: DDP and one AdamW step."""

from tests.benchmarks.harness import OURS, TORCHRUN, Experiment, Row, Size, compare, run


def experiment(size: Size) -> Experiment:
    what = f"{size.few} ranks, DDP and one AdamW step: command to exit"
    trained = compare(lambda launcher: run(launcher(size.few, "ddp_step.py")), OURS, TORCHRUN)
    return Experiment(trained, (Row(what, "wall", "s", TORCHRUN),))
