"""Whether and when a job starts again after a failure."""

from __future__ import annotations

from ddplaunch.control.rules import Rules
from ddplaunch.dataclass import dataclass

CRASH_LOOP = 3  # give up after so many attempts in a row that were shorter than ``min_uptime``
MAX_BACKOFF = 60.0  # seconds beyond which the wait before a restart does not double any more


@dataclass(frozen=True)
class Decision:
    """Start again after ``wait`` seconds or, where that is None, do not; ``remark`` says why if it needs saying."""

    wait: float | None
    remark: str | None = None


class Restarts:
    """Counts what has been used up."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.used = 0
        self._quick = 0  # attempts in a row that were shorter than ``min_uptime``

    def after(self, uptime: float) -> Decision:
        """Decide after an attempt that failed when its ranks had lived for ``uptime`` seconds."""
        rules = self._rules
        self._quick = self._quick + 1 if uptime < rules.min_uptime else 0
        if self.used >= rules.max_restarts:
            used = f"no restart is left: all {rules.max_restarts} were used"
            return Decision(None, used if rules.max_restarts else None)
        if self._quick >= CRASH_LOOP:
            short = f"{CRASH_LOOP} attempts in a row lasted less than {rules.min_uptime:g} s (--min-uptime)"
            return Decision(None, f"giving up: {short}")
        self.used += 1
        doubled = rules.restart_backoff * 2 ** max(0, self._quick - 1)
        return Decision(min(doubled, max(MAX_BACKOFF, rules.restart_backoff)))
