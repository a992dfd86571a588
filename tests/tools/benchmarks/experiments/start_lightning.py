"""A program that imports Lightning: its Trainer with DDP, four steps."""

from tests.tools.benchmarks import harness as bench

REQUIRES = ("lightning",)


def experiment(size: bench.Size) -> bench.Experiment:
    what = f"{size.few} ranks, Lightning's Trainer, 4 steps: the whole command"
    return bench.Experiment(
        bench.compare(
            lambda launcher: bench.measure_command(launcher(size.few, "lightning_fit.py")),
            *(bench.DDPLAUNCH, bench.TORCHRUN),
        ),
        (bench.Row(what, "wall", "s", bench.TORCHRUN),),
        rounds=3,
    )
