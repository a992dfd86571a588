"""Warm zygotes: ``ddplaunch warm``."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature
from ddplaunch.features.warm.options import Warming


class Warm(Feature):
    options = (Warming,)
    commands = (Command("warm", "List or stop warm zygotes, which make later runs start faster."),)


FEATURE = Warm()
