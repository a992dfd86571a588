"""The live view: ``ddplaunch top``."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature


class Live(Feature):
    requires = ("inspect", "runs")
    commands = (Command("top", "Show the live status of a running job and its ranks."),)


FEATURE = Live()
