"""The live view of a job, its own launcher's or another's: looks at it once a second, draws it, acts on keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from ddplaunch.console import view
from ddplaunch.console.view import Glance, Place
from ddplaunch.dataclass import replace
from ddplaunch.devices.gpu_usage import GpuUsage, GpuWatch
from ddplaunch.devices.usage import Used, used_by
from ddplaunch.diagnosis.inspection import Detail, Inspection
from ddplaunch.errors import harmless
from ddplaunch.job.requests import JobInspected
from ddplaunch.job.status import State, Status
from ddplaunch.loop import Loop, Timer
from ddplaunch.output.live import Live
from ddplaunch.output.rows import Row, Span, cut
from ddplaunch.output.terminal import BACKSPACE, ENTER, ESCAPE

EVERY = 1.0  # seconds between two looks
PACE = 30.0  # seconds between two looks at who is slow, which take up to 0.4 s of each rank
PACE_FIRST = 10.0  # seconds of looking until the first of them
LINES = 20  # of a rank's log
CLOSELY = 5.0  # seconds between two close ones
HINT = "s stacks  l log  f failures  / filter  z full screen  q leave  ? help"
_DIGITS = frozenset("0123456789")


class Job(Protocol):
    """What is looked at. Each answer comes later, or never where the job has ended."""

    def look(self, detail: Detail, answer: Callable[[JobInspected], None]) -> None: ...

    def log(self, rank: int, answer: Callable[[str], None]) -> None:
        """The last lines of a rank."""

    def failures(self, answer: Callable[[str], None]) -> None:
        """What has failed so far."""


class LiveView:
    """Draws a job on a screen until ``close``, or the key ``q``."""

    def __init__(self, loop: Loop, screen: Live, job: Job, *, chosen: str = "", left: Callable[[], None]) -> None:
        """``chosen`` is the filter; ``left`` is called when somebody wants to see the view no more."""
        self._loop, self._screen, self._job, self._left = loop, screen, job, left
        self._gpus = GpuWatch(loop, screen.refresh)
        self._looked: JobInspected | None = None
        self._before: Inspection | None = None
        self._used: Mapping[int, Used] = {}
        self._used_before: Mapping[int, Used] = {}
        self._asked = 0.0  # when the open question was put; 0 without one
        self._waits: frozenset[tuple[int, Place]] = frozenset()  # those that the sentences are about
        self._sentences: tuple[str, ...] = ()
        self._closely = 0.0  # when the next close look is due
        self._pace: tuple[str, ...] = ()
        self._pace_due = time.monotonic() + PACE_FIRST
        self._timer: Timer | None = None
        self._chosen = chosen
        self._prompt: tuple[str, str] | None = None  # what is asked for, and what has been typed
        self._keys = False
        self._over = False
        self.note = ""  # what is wrong with the job's answers

    def begin(self, *, keys: bool) -> None:
        """Show it; ``keys``: standard input is ours."""
        self._keys = keys
        self._screen.begin(self._picture, self._typed if keys else None)
        self._tick()

    def close(self) -> None:
        """Look no more; what is drawn stays."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._gpus.close()

    def update(self, status: Status) -> None:
        """The job has ended so."""
        if self._looked is not None:
            self._looked = JobInspected(status, self._looked.inspection)
            self._screen.refresh()

    def hear(self, looked: JobInspected) -> None:
        """The answer to a look."""
        self._asked, self.note = 0.0, ""
        if self._over:
            return
        if self._looked is not None:
            same = self._looked.status.attempt == looked.status.attempt
            self._before, self._used_before = self._looked.inspection if same else None, self._used
        self._looked = looked = replace(looked, inspection=view.steady(looked.inspection, self._before))
        self._judge(looked.inspection)
        pids = {rank.rank: rank.pid for rank in looked.status.ranks if rank.pid and rank.code is None}
        self._used = {rank: used for rank, pid in pids.items() if (used := used_by(pid))}
        self._screen.refresh()

    def _hear_pace(self, looked: JobInspected) -> None:
        self._pace = looked.inspection.pace

    def _judge(self, inspection: Inspection) -> None:
        """Say who waits for whom as long as they do."""
        waits = view.waiting(inspection)
        if any(rank.threads for rank in inspection.ranks):
            self._waits, self._sentences = waits, sentences(inspection)
        elif waits != self._waits:
            self._waits, self._sentences, self._closely = frozenset(), (), 0.0

    def _detail(self, now: float) -> Detail:
        """Look closely only where ranks wait: it interrupts them."""
        if self._looked is None or now < self._closely or not view.waiting(self._looked.inspection):
            return Detail.STATE
        self._closely = now + CLOSELY
        return Detail.WAITS

    def _tick(self) -> None:
        if self._over:
            return
        self._timer = self._loop.after(EVERY, self._tick)
        self._gpus.ask()
        now = time.monotonic()
        if now > self._pace_due and not self._waits:
            self._pace_due = now + PACE
            self._job.look(Detail.PACE, self._hear_pace)
        if not self._asked:
            self._asked = now
            self._job.look(self._detail(now), self.hear)
        elif now - self._asked > 2 * EVERY:
            self.note = f"no answer for {now - self._asked:.0f} s"
            self._screen.refresh()

    # --------------------------------------------------------------------------------------------------- the picture

    def _picture(self, columns: int, rows: int, full: bool) -> list[Row]:
        prompt = [cut((Span(f"{self._prompt[0]}: {self._prompt[1]}_", "1"),), columns - 1)] if self._prompt else []
        if self.note:
            prompt.insert(0, cut((Span(self.note, "1;33"),), columns - 1))
        if self._looked is None:
            return prompt
        draw = view.screenful if full else view.frame
        return [*draw(self._glance(self._looked), columns, max(1, rows - len(prompt))), *prompt]

    def _glance(self, looked: JobInspected) -> Glance:
        if looked.status.state is State.ENDED:
            return Glance(looked.status, looked.inspection, chosen=self._chosen)
        return Glance(
            looked.status,
            looked.inspection,
            self._before,
            self._used,
            self._used_before,
            self._gpus_of_job(),
            self._sentences or self._pace,
            self._chosen,
            HINT if self._keys else "",
        )

    def _gpus_of_job(self) -> tuple[GpuUsage, ...] | None:
        """The GPUs that ranks use; all where the driver numbers processes otherwise, as in a container."""
        usage = self._gpus.usage
        if usage is None or self._looked is None:
            return usage
        pids = {rank.pid for rank in self._looked.status.ranks}
        return tuple(gpu for gpu in usage if pids & {*gpu.pids}) or usage

    # ------------------------------------------------------------------------------------------------------- the keys

    def _typed(self, key: str) -> None:
        if self._prompt is not None:
            return self._answered(*self._prompt, key)
        match key:
            case "q":
                self._left()
            case "s":
                self._job.look(Detail.WAITS, self._show_stacks)
            case "l":
                self._prompt = ("rank", "")
            case "f":
                self._job.failures(self._screen.page)
            case "/":
                self._prompt = ("filter: 0,3-5, or a word like waiting", "")
            case "z":
                self._screen.full_screen(not self._screen.is_full)
            case "?":
                self._screen.page(help_text())
            case _ if key == ESCAPE:
                self._screen.full_screen(False)
        self._screen.refresh()

    def _show_stacks(self, looked: JobInspected) -> None:
        from ddplaunch.console.stacks import render_stacks

        self._screen.page(render_stacks(looked.inspection))

    def _answered(self, question: str, typed: str, key: str) -> None:
        """A key while something is asked for."""
        self._prompt = None
        if key == ENTER:
            self._take(question, typed)
        elif key != ESCAPE:
            self._prompt = (
                question,
                typed[:-1] if key == BACKSPACE else typed + key * (key.isprintable() and len(key) == 1),
            )
        self._screen.refresh()

    def _take(self, question: str, typed: str) -> None:
        if question != "rank":
            self._chosen = typed.strip()
        elif typed and {*typed} <= _DIGITS:
            self._job.log(int(typed), self._screen.page)


def sentences(inspection: Inspection) -> tuple[str, ...]:
    """Who waits for whom, if anybody does."""
    from ddplaunch.diagnosis.sentences import sentence
    from ddplaunch.diagnosis.waits import waits

    return tuple(sentence(wait, inspection) for wait in waits(inspection))


def help_text() -> str:
    """What the keys do, and what the marks mean."""
    keys = (
        ("s", "stacks: where each rank is (ddplaunch stacks)"),
        ("l", "log: the last lines of a rank (ddplaunch logs)"),
        ("f", "failures so far (ddplaunch report)"),
        ("/", "filter: 0,3-5, or a word like waiting (ddplaunch top --ranks)"),
        ("z", "full screen and back; Esc goes back too"),
        ("q", "leave the view; the job runs on"),
    )
    marks = ((look.mark, f"{what.value}: {look.meaning}") for what, look in view.LOOKS.items())
    return "".join(f"  {mark}  {text}\n" for mark, text in (*keys, *marks))


def failures_text(status: Status) -> str:
    """The ranks of this node that have failed."""
    failed = [(rank, rank.code) for rank in status.ranks if rank.code]
    if not failed:
        return "ddplaunch: no rank has failed\n"
    return "".join(
        f"ddplaunch: rank {rank.rank} (pid {rank.pid}): {f'signal {-code}' if code < 0 else f'exit code {code}'}\n"
        for rank, code in failed
    )


def last_lines(rank: int, data: bytes) -> str:
    """The last lines that a rank has printed, as ``ddplaunch logs`` shows them."""
    lines = data.decode(errors="replace").rstrip("\n").split("\n")[-LINES:]
    if not data:
        return f"ddplaunch: rank {rank} has printed nothing that is in memory here\n"
    seen = (harmless(line.rstrip("\r").rpartition("\r")[2]) for line in lines)  # of a progress bar its last state
    return "".join(f"[{rank}] {line}\n" for line in seen)
