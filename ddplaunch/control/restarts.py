"""Whether and when a job starts again after a failure."""

from __future__ import annotations

from ddplaunch import TYPE_CHECKING
from ddplaunch.control.rules import Rules
from ddplaunch.dataclass import dataclass

if TYPE_CHECKING:
    from ddplaunch.control.attempt import JobAttempt
    from ddplaunch.control.repetition import Way

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
        self._way: Way | None = None  # in which the latest attempt failed

    def after(self, attempt: JobAttempt, uptime: float, *, late: bool = False) -> Decision:
        """Decide after an attempt that failed when its ranks had lived for ``uptime`` seconds; ``late`` is too late."""
        rules = self._rules
        if late:
            return Decision(None, "no restart: the time of the job is over (--timeout)")
        self._quick = self._quick + 1 if uptime < rules.min_uptime else 0
        if self.used >= rules.max_restarts:
            used = f"no restart is left: all {rules.max_restarts} were used"
            return Decision(None, used if rules.max_restarts else None)
        if (futile := self._futile(attempt, uptime)) is not None:
            return Decision(None, f"{futile}: not restarted")
        if self._quick >= CRASH_LOOP:
            short = f"{CRASH_LOOP} attempts in a row lasted less than {rules.min_uptime:g} s (--min-uptime)"
            return Decision(None, f"giving up: {short}")
        self.used += 1
        doubled = rules.restart_backoff * 2 ** max(0, self._quick - 1)
        return Decision(min(doubled, max(MAX_BACKOFF, rules.restart_backoff)))

    def announce(self, wait: float) -> str:
        """What people read of the restart that was decided: "restart 1 of 3 in 2 s"."""
        return f"restart {self.used} of {self._rules.max_restarts}" + (f" in {wait:g} s" if wait else "")

    def _futile(self, attempt: JobAttempt, uptime: float) -> str | None:
        """Why another attempt would be in vain, by ``--restart-on``."""
        from ddplaunch.control.repetition import way_of
        from ddplaunch.control.transience import is_transient

        if attempt.broken_first:  # from outside, as a rank that is killed
            self._way = None
            return None
        if self._rules.restart_on == "transient" and attempt.cut is None:
            assert attempt.verdict is not None
            first = attempt.verdict.first
            if not is_transient(first):
                how = f"failed with {kind}" if (kind := first.kind) else first.reason
                return f"rank {first.rank} {how}, which is not transient (--restart-on transient)"
        before, self._way = self._way, way_of(attempt, uptime)
        if self._rules.restart_on != "always" and self._way is not None and self._way.repeats(before):
            return f"rank {self._way.rank} failed at {self._way.place} twice in the same way"
        return None
