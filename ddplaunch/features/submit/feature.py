"""Batch schedulers: ``ddplaunch submit``."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature, SchedulerEntry


class Submit(Feature):
    requires = ("programs", "code", "reservations")
    locators = ("code_copies", "via_jobs")
    schedulers = (
        SchedulerEntry("slurm", "Slurm", "slurm", "Slurm"),
        SchedulerEntry("sge", "Grid Engine", "gridengine", "GridEngine"),
        SchedulerEntry("pbs", "PBS", "pbs", "Pbs"),
        SchedulerEntry("lsf", "LSF", "lsf", "Lsf"),
        SchedulerEntry("local", "this machine", "local", "Local"),
    )
    commands = (
        Command(
            "submit",
            "Submit a training job to Slurm, Grid Engine, PBS, LSF, Kubernetes, or this machine.",
            heading="Clusters",
            place=1,
            also=("sbatch", "qsub", "bsub"),
            in_config=True,
        ),
    )


FEATURE = Submit()
