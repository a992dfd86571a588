"""The check of every node before an attempt: ``--check``."""

from __future__ import annotations

from ddplaunch.core.feature import Feature
from ddplaunch.features.check.options import Checking


class Check(Feature):
    options = (Checking,)


FEATURE = Check()
