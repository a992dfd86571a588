"""Jobs over SSH: ``--hosts``."""

from __future__ import annotations

from ddplaunch.core.feature import Feature


class Ssh(Feature):
    locators = ("job_records",)


FEATURE = Ssh()
