"""What the zygote imports before it forks: ``--preload``."""

from __future__ import annotations

from ddplaunch.core.feature import Feature
from ddplaunch.features.preload.options import Preloading


class Preload(Feature):
    options = (Preloading,)


FEATURE = Preload()
