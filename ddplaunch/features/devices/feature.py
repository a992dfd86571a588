"""The hardware: ``ddplaunch devices``."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature


class Devices(Feature):
    commands = (
        Command(
            "devices", "List the GPUs and CPUs of this machine.", heading="Housekeeping", also=("gpus", "gpu", "info")
        ),
    )


FEATURE = Devices()
