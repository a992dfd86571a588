"""The debugger: ``ddplaunch debug``."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature


class Debug(Feature):
    requires = ("inspect", "runs")
    commands = (Command("debug", "Attach to the debugger of the ranks, or pause a rank."),)
    requests = ("request",)


FEATURE = Debug()
