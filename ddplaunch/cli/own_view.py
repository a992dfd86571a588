"""``run --ui``: the live view in the terminal of the job itself, below its log."""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch.cli.live import LiveView, failures_text, last_lines
from ddplaunch.control.failure import Verdict
from ddplaunch.diagnosis.inspection import Detail, Inspection
from ddplaunch.job.door import ServedJob
from ddplaunch.job.requests import JobInspected
from ddplaunch.loop import Loop
from ddplaunch.output.events import Ended, Event, Planned, Restarting, Signalled
from ddplaunch.output.live import Live


class OwnView:
    """An observer behind the job's ``Watch``; it shows the view until the job ends, or somebody types ``q``."""

    def __init__(self, loop: Loop, screen: Live, job: ServedJob) -> None:
        self._screen, self._job = screen, job
        self._view = LiveView(loop, screen, self, left=self._leave)
        self._verdicts: list[Verdict] = []  # of the attempts that have failed
        self._nnodes = 1
        loop.soon(lambda: self._view.begin(keys=True))  # when the settings are noted that the terminal gets back

    def observe(self, event: Event) -> None:
        if isinstance(event, Planned):
            self._nnodes = event.plan.nnodes
        if isinstance(event, Signalled):
            self._screen.full_screen(False)  # what is said of the end stands in the log
        if isinstance(event, Restarting) and event.verdict:
            self._verdicts.append(event.verdict)
        if isinstance(event, Ended):
            self._view.close()
            self._view.update(self._job.status())

    def close(self) -> None:
        """Give the terminal back, whatever happened."""
        self._view.close()
        self._screen.close()

    def look(self, detail: Detail, answer: Callable[[JobInspected], None]) -> None:
        def inspected(inspection: Inspection) -> None:
            answer(JobInspected(self._job.status(), inspection))

        self._job.inspect(detail, inspected)

    def log(self, rank: int, answer: Callable[[str], None]) -> None:
        answer(last_lines(rank, self._job.printed(rank)))

    def failures(self, answer: Callable[[str], None]) -> None:
        from ddplaunch.console.failure import render_verdict

        earlier = "".join(render_verdict(each, self._nnodes) for each in self._verdicts)
        answer(earlier + failures_text(self._job.status()))

    def _leave(self) -> None:
        self._view.close()
        self._screen.end()
