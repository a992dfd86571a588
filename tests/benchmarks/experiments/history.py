"""What the history and the inspection endpoint cost a run that is not inspected."""

from tests.benchmarks.contenders import ddplaunch
from tests.benchmarks.runner import OURS, Experiment, Row, Size
from tests.benchmarks.turns import run

WITHOUT = ("--no-inspect", "--no-history")


def experiment(size: Size) -> Experiment:
    without = " ".join(WITHOUT)
    what = f"{size.many} ranks, with inspection and history"
    return Experiment(
        {
            OURS: lambda: run(ddplaunch()(size.many, "collective.py")),
            without: lambda: run(ddplaunch(*WITHOUT)(size.many, "collective.py")),
        },
        (
            Row(f"{what}: the whole command", "wall", "s", without),
            Row(f"{what}: CPU of the whole job", "cpu", "CPU-s", without),
        ),
    )
