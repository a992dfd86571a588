"""What the history and the inspection endpoint cost a run that is not inspected."""

from tests.benchmarks.harness import OURS, Experiment, Row, Size, compare, ddplaunch, run


def experiment(size: Size) -> Experiment:
    without = ("--no-inspect", "--no-history")
    other = " ".join(without)
    what = f"{size.many} ranks, with inspection and history"
    return Experiment(
        compare(
            lambda launcher: run(launcher(size.many, "collective.py")),
            **{OURS: ddplaunch(), other: ddplaunch(*without)},
        ),
        (
            Row(f"{what}: the whole command", "wall", "s", other),
            Row(f"{what}: CPU of the whole job", "cpu", "CPU-s", other),
        ),
    )
