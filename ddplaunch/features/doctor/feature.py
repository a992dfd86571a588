"""Diagnostics of machines: ``ddplaunch doctor``."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature


class Doctor(Feature):
    requires = ("check",)
    commands = (
        Command(
            "doctor",
            "Check one or many machines for problems that break or slow jobs.",
            heading="Diagnose",
            also=("check",),
        ),
    )


FEATURE = Doctor()
