"""Batch schedulers: ``ddplaunch submit``."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature, SchedulerEntry


class Submit(Feature):
    requires = ("runs", "programs", "code")
    locators = ("code_copies",)
    schedulers = (
        SchedulerEntry("slurm", "Slurm", "slurm", "Slurm"),
        SchedulerEntry("sge", "Grid Engine", "gridengine", "GridEngine"),
        SchedulerEntry("pbs", "PBS", "pbs", "Pbs"),
        SchedulerEntry("lsf", "LSF", "lsf", "Lsf"),
    )
    commands = (
        Command(
            "submit",
            "Submit a training job to Slurm, Grid Engine, PBS, LSF or Kubernetes.",
            heading="Clusters",
            place=1,
            also=("sbatch", "qsub", "bsub"),
            in_config=True,
        ),
    )


FEATURE = Submit()
