"""A program that imports transformers, from a zygote that is kept warm: the time to its first step."""

import tempfile
from pathlib import Path

from tests.benchmarks import harness as bench

REQUIRES = ("transformers",)


def experiment(size: bench.Size) -> bench.Experiment:
    kept = tempfile.TemporaryDirectory(prefix="benchmark-warm-")

    def stepped(launcher: bench.Launcher, folder: Path | None = None) -> bench.Values:
        with bench.Job(launcher(size.many, "hf_trainer.py"), folder=folder) as job:
            job.until("step", size.many)
            job.succeed()
            return {"step": min(job.times("step")) - job.began}

    what = f"{size.many} ranks, Hugging Face's Trainer, --warm: from the command to the first step"
    return bench.Experiment(
        {
            bench.OURS: lambda: stepped(bench.ddplaunch("--warm"), Path(kept.name)),
            bench.TORCHRUN: lambda: stepped(bench.LAUNCHERS[bench.TORCHRUN]),
        },
        (bench.Row(what, "step", "s", bench.TORCHRUN),),
        rounds=3,
    )
