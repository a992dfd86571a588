"""The states of an attempt, and which may follow which."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where an attempt stands."""

    WAITING = "nothing runs here until the job says what comes next"
    LOADING = "ranks are asked for, and the zygote is importing"
    RUNNING = "ranks run"
    STOPPING = "ranks have been told to stop"
    SWEEPING = "what is left is being killed"
    DRAINING = "the last output is coming in"
    ENDED = "all is over"


NEXT = {
    Phase.WAITING: {Phase.LOADING, Phase.RUNNING},
    Phase.LOADING: {Phase.RUNNING, Phase.DRAINING},
    Phase.RUNNING: {Phase.STOPPING, Phase.SWEEPING, Phase.DRAINING},
    Phase.STOPPING: {Phase.SWEEPING, Phase.DRAINING},
    Phase.SWEEPING: {Phase.DRAINING},
    Phase.DRAINING: {Phase.WAITING},
    Phase.ENDED: set(),
}
"""From anywhere the end may follow."""
