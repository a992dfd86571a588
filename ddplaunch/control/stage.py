"""Where a job stands as a whole, and where it can go from there."""

from __future__ import annotations

from enum import Enum


class Stage(Enum):
    """Where a job stands as a whole."""

    JOINING = "waiting for nodes"
    CHECKING = "every node looks at itself"
    RUNNING = "an attempt runs"
    STOPPING = "an attempt is being stopped"
    PAUSING = "waiting to start again"
    ENDED = "all is over"


NEXT = {
    Stage.JOINING: {Stage.CHECKING, Stage.RUNNING, Stage.ENDED},
    Stage.CHECKING: {Stage.RUNNING, Stage.ENDED},
    Stage.RUNNING: {Stage.STOPPING, Stage.PAUSING, Stage.ENDED},
    Stage.STOPPING: {Stage.PAUSING, Stage.ENDED},
    Stage.PAUSING: {Stage.CHECKING, Stage.RUNNING, Stage.ENDED},
    Stage.ENDED: set[Stage](),
}

BEFORE_RANKS = {Stage.JOINING, Stage.CHECKING, Stage.PAUSING}
"""Where no rank runs."""
