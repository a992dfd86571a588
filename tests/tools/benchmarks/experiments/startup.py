"""The start of 8 ranks with one all_reduce, beside one import of torch, torchrun and mp.spawn."""

import sys

from tests.tools.benchmarks import harness as bench


def experiment(size: bench.Size) -> bench.Experiment:
    def measure_start(launcher: bench.Launcher) -> bench.Values:
        with bench.Job(launcher(size.many, "collective.py")) as job:
            reached = job.wait_for_ranks("collective", size.many)
            job.succeed()
            return {"reached": reached - job.started_at, "wall": job.duration_s, "cpu": job.cpu_s}

    def measure_import() -> bench.Values:
        values = bench.measure_command([sys.executable, "-c", "import torch"])
        return {**values, "reached": values["wall"]}

    ranks = f"{size.many} ranks"
    return bench.Experiment(
        {**bench.compare(measure_start, bench.DDPLAUNCH, bench.TORCHRUN, bench.SPAWN), bench.IMPORT: measure_import},
        (
            bench.Row(f"{ranks}: command to last rank past its first all_reduce", "reached", "s", bench.IMPORT),
            bench.Row("the same, over torchrun", "reached", "s", bench.TORCHRUN),
            bench.Row(f"{ranks}: the whole command", "wall", "s", bench.IMPORT),
            bench.Row(f"{ranks}: CPU of the whole job", "cpu", "CPU-s", bench.IMPORT),
        ),
    )
