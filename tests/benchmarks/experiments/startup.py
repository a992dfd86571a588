"""The start of 8 ranks with one all_reduce, beside one import of torch, torchrun and mp.spawn."""

import sys

from tests.benchmarks import harness as bench


def experiment(size: bench.Size) -> bench.Experiment:
    def started(launcher: bench.Launcher) -> bench.Values:
        with bench.Job(launcher(size.many, "collective.py")) as job:
            reached = job.until("collective", size.many)
            job.succeed()
            return {"reached": reached - job.began, "wall": job.lasted, "cpu": job.cpu}

    def imported() -> bench.Values:
        values = bench.run([sys.executable, "-c", "import torch"])
        return {**values, "reached": values["wall"]}

    ranks = f"{size.many} ranks"
    return bench.Experiment(
        {**bench.compare(started, bench.OURS, bench.TORCHRUN, bench.SPAWN), bench.IMPORT: imported},
        (
            bench.Row(f"{ranks}: command to last rank past its first all_reduce", "reached", "s", bench.IMPORT),
            bench.Row("the same, over torchrun", "reached", "s", bench.TORCHRUN),
            bench.Row(f"{ranks}: the whole command", "wall", "s", bench.IMPORT),
            bench.Row(f"{ranks}: CPU of the whole job", "cpu", "CPU-s", bench.IMPORT),
        ),
    )
