"""Warm zygotes: ``ddplaunch warm``."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature


class Warm(Feature):
    requires = ("preload",)
    commands = (Command("warm", "List or stop warm zygotes, which make later runs start faster."),)


FEATURE = Warm()
