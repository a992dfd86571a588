"""Whether and when a job starts again after a failure; decisions only, the supervisor carries them out."""

from __future__ import annotations

from dataclasses import dataclass

CRASH_LOOP = 3  # so many attempts in a row that are shorter than the minimal uptime are the last
MAX_BACKOFF = 60.0  # seconds beyond which the wait before a restart does not double any more


@dataclass(frozen=True)
class Decision:
    """Start again after ``wait`` seconds or, where that is None, do not; ``remark`` says why if it needs saying."""

    wait: float | None
    remark: str | None = None


class Restarts:
    """Counts what has been used up."""

    def __init__(self, max_restarts: int, backoff: float, min_uptime: float) -> None:
        """Times in seconds; ``max_restarts`` restarts in the life of the job."""
        self.max_restarts = max_restarts
        self.used = 0
        self._backoff = backoff
        self._min_uptime = min_uptime
        self._quick = 0

    def after(self, uptime: float) -> Decision:
        """Decide after an attempt that failed when its ranks had lived for ``uptime`` seconds."""
        self._quick = self._quick + 1 if uptime < self._min_uptime else 0
        if self.used >= self.max_restarts:
            used = f"no restart is left: all {self.max_restarts} were used"
            return Decision(None, used if self.max_restarts else None)
        if self._quick >= CRASH_LOOP:
            return Decision(
                None,
                f"giving up: {CRASH_LOOP} attempts in a row lasted less than {self._min_uptime:g} s (--min-uptime)",
            )
        self.used += 1
        doubled = self._backoff * 2 ** max(0, self._quick - 1)
        return Decision(min(doubled, max(MAX_BACKOFF, self._backoff)))
