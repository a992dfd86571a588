"""The shortest training: DDP and one AdamW step."""

from tests.tools.benchmarks import harness as bench


def experiment(size: bench.Size) -> bench.Experiment:
    what = f"{size.few} ranks, DDP and one AdamW step: command to exit"
    turns = bench.compare(
        lambda launcher: bench.measure_command(launcher(size.few, "ddp_step.py")),
        *(bench.DDPLAUNCH, bench.TORCHRUN),
    )
    return bench.Experiment(turns, (bench.Row(what, "wall", "s", bench.TORCHRUN),))
