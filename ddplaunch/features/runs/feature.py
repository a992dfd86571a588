"""Runs: the commands that list, follow, stop and report them."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature


class Runs(Feature):
    requires = ("inspect",)
    commands = (
        Command("stop", "Stop a running job.", module="stop"),
        Command("wait", "Wait for a job to end and return its exit code.", module="stop"),
        Command("ps", "List your jobs: running here, submitted and recently ended.", module="ps"),
        Command("logs", "Show the output of a run.", module="logs"),
        Command("report", "Summarize a run: result, failure, goodput, memory.", module="report"),
        Command("attach", "Follow the log of a submitted job.", module="attach"),
        Command("clean", "Delete the records of finished runs.", module="clean"),
    )


FEATURE = Runs()
