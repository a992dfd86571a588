"""The command ``ddplaunch stacks``."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature


class Stacks(Feature):
    commands = (
        Command(
            "stacks",
            "Show the stacks of all ranks and which ranks wait for which.",
            heading="Diagnose",
            also=("bt", "trace", "backtrace", "hang"),
        ),
    )


FEATURE = Stacks()
