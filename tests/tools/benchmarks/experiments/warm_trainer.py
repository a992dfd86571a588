"""A program that imports transformers, from a zygote that is kept warm: the time to its first step."""

import tempfile
from pathlib import Path

from tests.tools.benchmarks import harness as bench

REQUIRES = ("transformers",)


def experiment(size: bench.Size) -> bench.Experiment:
    warm_folder = tempfile.TemporaryDirectory(prefix="benchmark-warm-")

    def measure_first_step(launcher: bench.Launcher, folder: Path | None = None) -> bench.Values:
        with bench.Job(launcher(size.many, "hf_trainer.py"), folder=folder) as job:
            job.wait_for_ranks("step", size.many)
            job.succeed()
            return {"step": min(job.times("step")) - job.started_at}

    what = f"{size.many} ranks, Hugging Face's Trainer, --warm: from the command to the first step"
    return bench.Experiment(
        {
            bench.DDPLAUNCH: lambda: measure_first_step(bench.ddplaunch("--warm"), Path(warm_folder.name)),
            bench.TORCHRUN: lambda: measure_first_step(bench.LAUNCHERS[bench.TORCHRUN]),
        },
        (bench.Row(what, "step", "s", bench.TORCHRUN),),
        rounds=3,
    )
