"""Warm zygotes: ``--warm`` and ``ddplaunch warm``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.core.feature import Command, Feature
from ddplaunch.features.warm.options import Warming

if TYPE_CHECKING:
    from ddplaunch.base.options import Options
    from ddplaunch.core.agent.zygote_process import ZygoteSource


class Warm(Feature):
    requires = ("preload",)
    options = (Warming,)
    commands = (
        Command("warm", "List or stop warm zygotes, which make later runs start faster.", heading="Housekeeping"),
    )

    def make_zygote_source(self, options: Options) -> ZygoteSource | None:
        from ddplaunch.features.warm.idle_timeout import read_idle_timeout

        idle_timeout_s, unavailable_reason = read_idle_timeout(options)
        if not (idle_timeout_s or unavailable_reason):
            return None
        from ddplaunch.features.warm.warm_starter import WarmZygoteStarter

        return WarmZygoteStarter(idle_timeout_s, unavailable_reason)


FEATURE = Warm()
