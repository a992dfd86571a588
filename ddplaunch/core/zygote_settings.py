"""How this node starts its zygotes; known before anything else of the job, as the first one is started early."""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.core.zygote_plan import ZygotePlan


class ZygoteSettings(Struct, frozen=True):
    """The options that concern the zygote."""

    plan: ZygotePlan
    preempt_signal: int | None = None  # the scheduler's preemption signal, if any
