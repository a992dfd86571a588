"""How this node starts its zygotes; known before anything else of the job, as the first one is started early."""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.features.preload.preload_plan import PreloadPlan


class ZygoteSettings(Struct, frozen=True):
    """The options that concern the zygote."""

    preload: PreloadPlan  # what it imports, if it forks
    preempt_signal: int | None = None  # the scheduler's preemption signal, if any
    warm_idle_timeout_s: float | None = None  # an idle warm zygote ends after this; None: no warm zygote
    warm_unavailable_reason: str | None = None  # why there is none although --warm was given
