"""ddplaunch from Python, as a feature: it adds nothing to the command line."""

from __future__ import annotations

from ddplaunch.core.feature import Feature


class Python(Feature):
    requires = ("preload",)


FEATURE = Python()
