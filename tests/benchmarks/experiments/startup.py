"""The start of 8 ranks with one all_reduce, beside one import of torch, torchrun and mp.spawn."""

from tests.benchmarks.contenders import python
from tests.benchmarks.runner import IMPORT, OURS, SPAWN, TORCHRUN, Experiment, Row, Size
from tests.benchmarks.turns import compare, run, run_to


def experiment(size: Size) -> Experiment:
    ranks = f"{size.many} ranks"
    started = compare(
        lambda launcher: run_to(launcher(size.many, "collective.py"), "collective", size.many), OURS, TORCHRUN, SPAWN
    )
    return Experiment(
        {**started, IMPORT: lambda: run(python("import torch"))},
        (
            Row(f"{ranks}: command to last rank past its first all_reduce", "reached", "s", IMPORT, "wall"),
            Row("the same, over torchrun", "reached", "s", TORCHRUN),
            Row(f"{ranks}: the whole command", "wall", "s", IMPORT),
            Row(f"{ranks}: CPU of the whole job", "cpu", "CPU-s", IMPORT),
        ),
    )
