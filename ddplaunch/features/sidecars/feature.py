"""Programs beside the ranks: ``--sidecar`` and ``--tensorboard``."""

from __future__ import annotations

from ddplaunch.core.feature import Feature
from ddplaunch.features.sidecars.options import SidecarPrograms


class Sidecars(Feature):
    options = (SidecarPrograms,)


FEATURE = Sidecars()
