"""Batch schedulers: ``ddplaunch submit``."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature


class Submit(Feature):
    requires = ("runs", "sidecars")
    commands = (Command("submit", "Submit a training job to Slurm, Grid Engine, PBS or LSF."),)


FEATURE = Submit()
