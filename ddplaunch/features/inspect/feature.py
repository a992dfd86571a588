"""Inspection: ``ddplaunch stacks``."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature


class Inspect(Feature):
    commands = (Command("stacks", "Show the stacks of all ranks and which ranks wait for which."),)
    requests = ("request",)


FEATURE = Inspect()
