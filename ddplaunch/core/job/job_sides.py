"""The job sides of all features in one coordinator, isolated from the job and from each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ddplaunch.core.feature import Feature, JobContext, JobSide, load_features
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.messages import CheckNode, Message, NoteMessage
from ddplaunch.core.output.isolation import Isolation


class JobSides:
    """Makes the sides, and passes calls on to them; one that raises is reported once, and the job goes on."""

    def __init__(
        self,
        config: JobConfig,
        send: Callable[[int, Message], None],
        features: Iterable[tuple[str, Feature]] | None = None,
    ) -> None:
        """``send(node_rank, message)`` sends a control message; ``features``: by name, None for all."""
        self._sides: list[tuple[Isolation, JobSide]] = []
        for name, feature in load_features() if features is None else features:
            isolation = Isolation(f"the feature {name}", lambda text: send(0, NoteMessage(text)))
            if (side := isolation.call(feature.make_job_side, JobContext(config))) is not None:
                self._sides.append((isolation, side))

    def _replies(self, hook: str, *arguments: object) -> Iterable[Any]:
        """Call a hook of each side; yield what they return, without None."""
        for isolation, side in self._sides:
            if (reply := isolation.call(getattr(side, hook), *arguments)) is not None:
                yield reply

    def before_start(self, attempt: int) -> CheckNode | None:
        return next(iter(self._replies("before_start", attempt)), None)
