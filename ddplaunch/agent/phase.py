"""The states of an attempt, and which may follow which."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where an attempt stands."""

    LOADING = "the zygote is importing"
    RUNNING = "ranks run"
    STOPPING = "ranks have been told to stop"
    SWEEPING = "what is left is being killed"
    DRAINING = "the last output is coming in"
    PAUSING = "waiting to start again"
    ENDED = "all is over"


NEXT = {
    Phase.LOADING: {Phase.RUNNING, Phase.DRAINING, Phase.ENDED},
    Phase.RUNNING: {Phase.STOPPING, Phase.SWEEPING, Phase.DRAINING},
    Phase.STOPPING: {Phase.SWEEPING, Phase.DRAINING},
    Phase.SWEEPING: {Phase.DRAINING},
    Phase.DRAINING: {Phase.PAUSING, Phase.ENDED},
    Phase.PAUSING: {Phase.RUNNING, Phase.ENDED},
    Phase.ENDED: set(),
}
