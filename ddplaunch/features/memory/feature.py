"""Explanations of exhausted memory, and ``--oom-report``."""

from __future__ import annotations

from ddplaunch.core.feature import Feature
from ddplaunch.features.memory.options import MemoryReport


class Memory(Feature):
    options = (MemoryReport,)


FEATURE = Memory()
