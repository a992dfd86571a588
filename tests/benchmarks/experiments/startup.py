"""The start of 8 ranks with one all_reduce, beside one import of torch, torchrun and mp.spawn."""

import sys

from tests.benchmarks.harness import (
    IMPORT,
    OURS,
    SPAWN,
    TORCHRUN,
    Experiment,
    Job,
    Launcher,
    Row,
    Size,
    Values,
    compare,
    run,
)


def experiment(size: Size) -> Experiment:
    def started(launcher: Launcher) -> Values:
        with Job(launcher(size.many, "collective.py")) as job:
            reached = job.until("collective", size.many)
            job.succeed()
            return {"reached": reached - job.began, "wall": job.lasted, "cpu": job.cpu}

    def imported() -> Values:
        values = run([sys.executable, "-c", "import torch"])
        return {**values, "reached": values["wall"]}

    ranks = f"{size.many} ranks"
    return Experiment(
        {**compare(started, OURS, TORCHRUN, SPAWN), IMPORT: imported},
        (
            Row(f"{ranks}: command to last rank past its first all_reduce", "reached", "s", IMPORT),
            Row("the same, over torchrun", "reached", "s", TORCHRUN),
            Row(f"{ranks}: the whole command", "wall", "s", IMPORT),
            Row(f"{ranks}: CPU of the whole job", "cpu", "CPU-s", IMPORT),
        ),
    )
