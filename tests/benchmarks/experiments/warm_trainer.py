"""A program that imports transformers, from a zygote that is kept warm: the time to its first step."""

import tempfile
from pathlib import Path

from tests.benchmarks.harness import LAUNCHERS, OURS, TORCHRUN, Experiment, Job, Row, Size, Values, ddplaunch

REQUIRES = ("transformers",)


def experiment(size: Size) -> Experiment:
    kept = tempfile.TemporaryDirectory(prefix="benchmark-warm-")

    def stepped(command: list[str], folder: Path | None = None) -> Values:
        with Job(command, folder=folder) as job:
            job.until("step", size.many)
            job.succeed()
            return {"step": min(job.times("step")) - job.began}

    what = f"{size.many} ranks, Hugging Face's Trainer, --warm: from the command to the first step"
    return Experiment(
        {
            OURS: lambda: stepped(ddplaunch("--warm")(size.many, "hf_trainer.py"), Path(kept.name)),
            TORCHRUN: lambda: stepped(LAUNCHERS[TORCHRUN](size.many, "hf_trainer.py")),
        },
        (Row(what, "step", "s", TORCHRUN),),
        rounds=3,
    )
