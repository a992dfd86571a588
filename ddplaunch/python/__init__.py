"""ddplaunch from Python: functions in, results out.

from ddplaunch import launch

accuracy = launch(train, 0.1, nproc=4)  # what each rank returned, in order of ranks
"""

from __future__ import annotations

from ddplaunch.python.failed import RankFailed
from ddplaunch.python.launching import launch, launch_async
from ddplaunch.python.session import Session

__all__ = ["RankFailed", "Session", "launch", "launch_async"]
