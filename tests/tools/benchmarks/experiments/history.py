"""What the history and the inspection endpoint cost a run that is not inspected."""

from tests.tools.benchmarks import harness as bench


def experiment(size: bench.Size) -> bench.Experiment:
    without = ("--no-inspect", "--no-history")
    other = " ".join(without)
    what = f"{size.many} ranks, with inspection and history"
    return bench.Experiment(
        bench.compare(
            lambda launcher: bench.measure_command(launcher(size.many, "collective.py")),
            bench.DDPLAUNCH,
            **{other: bench.ddplaunch(*without)},
        ),
        (
            bench.Row(f"{what}: the whole command", "wall", "s", other),
            bench.Row(f"{what}: CPU of the whole job", "cpu", "CPU-s", other),
        ),
    )
