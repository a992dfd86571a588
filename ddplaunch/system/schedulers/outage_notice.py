"""Notices for a user who follows a job while its scheduler does not answer."""

from __future__ import annotations

import time

FIRST_NOTICE_DELAY_S = 10.0
REMINDER_INTERVAL_S = 60.0
"""Seconds without an answer until the first notice, and between reminders."""


class OutageNotice:
    """Describes an outage of one scheduler, from its first unanswered query to its next answer."""

    def __init__(self, scheduler: str, job: str) -> None:
        """``scheduler``: its name in messages; ``job``: the number of the job that is followed."""
        self._scheduler, self._job = scheduler, job
        self._answered_at = time.monotonic()
        self._noticed_at: float | None = None  # None: no notice of this outage has been printed

    def update(self, *, answered: bool) -> str | None:
        """Record the result of a query; return the line to print now, if any."""
        now = time.monotonic()
        if answered:
            self._answered_at, noticed_at, self._noticed_at = now, self._noticed_at, None
            return None if noticed_at is None else f"{self._scheduler} answers again"
        due_at = self._answered_at + FIRST_NOTICE_DELAY_S
        if self._noticed_at is not None:
            due_at = self._noticed_at + REMINDER_INTERVAL_S
        if now < due_at:
            return None
        self._noticed_at = now
        seconds = now - self._answered_at
        return f"{self._scheduler} has not answered for {seconds:.0f} s; job {self._job} is not affected"
