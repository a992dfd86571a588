"""The live view of a job, its own launcher's or another's: inspects it once a second, draws it, acts on keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ddplaunch.console.failure import render_verdict
from ddplaunch.console.stacks import render_stacks
from ddplaunch.control.failure import Verdict
from ddplaunch.dataclass import replace
from ddplaunch.devices.gpu_usage import GpuUsage, GpuWatch, used_by_ranks
from ddplaunch.devices.processes import used_by
from ddplaunch.diagnosis.inspection import Condition, Detail, Inspection
from ddplaunch.diagnosis.readings import Reading
from ddplaunch.diagnosis.sentences import sentence
from ddplaunch.diagnosis.waits import waits
from ddplaunch.errors import harmless
from ddplaunch.job.door import ServedJob
from ddplaunch.job.requests.inspection import JobInspected, last_of
from ddplaunch.job.status import State, Status
from ddplaunch.live.frame import frame, screenful, table_rows
from ddplaunch.live.rows import Row, Span, cut, styled
from ddplaunch.live.screen import LiveScreen
from ddplaunch.live.state import (
    Doing,
    Moment,
    Snapshot,
    Trend,
    WaitPoint,
    all_doing,
    place_of,
    rate,
    steady,
    waiting,
    work,
)
from ddplaunch.live.table import ORDERS
from ddplaunch.loop import Loop, Timer
from ddplaunch.output.events import Ended, Event, Planned, Restarting, Signalled
from ddplaunch.output.terminal import BACKSPACE, ENTER, ESCAPE
from ddplaunch.rank.processes import is_suspended

EVERY = 1.0  # seconds between two inspections
PACE = 30.0  # seconds between two questions who is slow, which take up to 0.4 s of each rank
PACE_FIRST = 10.0  # seconds until the first of them
LINES = 20  # of a rank's log
CLOSELY = 5.0  # seconds between two close inspections
SHOWN_CLOSELY = 64  # ranks up to which the full screen says at which line each is
HINT = "? help  q leave  s stacks  l log  Enter stack  o order  / filter  x stop"
PAGE_HINT = "Esc back  Up, Down"
UP, DOWN, PAGE_UP, PAGE_DOWN = ("\x1b[A", "\x1bOA", "k"), ("\x1b[B", "\x1bOB", "j"), ("\x1b[5~",), ("\x1b[6~", " ")
_STEPS = {key: step for keys, step in ((UP, -1), (DOWN, 1), (PAGE_UP, -10), (PAGE_DOWN, 10)) for key in keys}
_DIGITS = frozenset("0123456789")


class ViewedJob(Protocol):
    """What is shown. Each answer comes later, or never where the job has ended."""

    def inspect(self, detail: Detail, answer: Callable[[JobInspected], None], *, lines: bool = False) -> None:
        """What the ranks do; ``lines``: with the last line of each."""

    def stop(self) -> None:
        """End the job as Ctrl-C does."""

    def log(self, rank: int, answer: Callable[[str], None]) -> None:
        """The last lines of a rank."""

    def failures(self, answer: Callable[[str], None]) -> None:
        """What has failed so far."""

    def advice_to_continue(self) -> str:
        """How a person continues it; "" where it is not suspended."""


class LiveView:
    """Draws a job on a screen until ``close``, or the key ``q``."""

    def __init__(
        self,
        loop: Loop,
        screen: LiveScreen,
        job: ViewedJob,
        *,
        chosen: str = "",
        left: Callable[[], None],
        other: Callable[..., None] | None = None,
    ) -> None:
        """``chosen`` is the filter; ``left`` is called when the user leaves the view.

        ``other`` gives the terminal to another command for a while, whose words it is called with.
        """
        self._loop, self._screen, self._job, self._left, self._other = loop, screen, job, left, other
        self._gpus = GpuWatch(loop)
        self._now: Moment | None = None
        self._before: Moment | None = None  # in the same attempt
        self._asked = 0.0  # when the open question was put; 0 without one
        self._waits: frozenset[tuple[int, WaitPoint]] = frozenset()  # those that the sentences are about
        self._sentences: tuple[str, ...] = ()
        self._closely = 0.0  # when the next close inspection is due
        self._pace: tuple[str, ...] = ()
        self._pace_due = time.monotonic() + PACE_FIRST
        self._timer: Timer | None = None
        self._chosen = chosen
        self._prompt: tuple[str, str] | None = None  # what is asked for, and what has been typed
        self._keys = False
        self._over = False
        self._note = ""  # what is wrong with the job's answers
        self._suspended = False
        self._places: dict[int, str] = {}
        self._late: dict[int, float] = {}
        self._trends = {name: Trend() for name in ("collectives/s", "CPU %", "GPU %")}
        self._order = ""
        self._cursor: int | None = None
        self._page: tuple[str, int] | None = None  # a text that is shown in the full screen, and its first row

    def remember(self, readings: Sequence[Reading]) -> None:
        """Begin the trends with what was before the view was opened."""
        for each, trend in zip((_rate, _cpus, _busy), self._trends.values(), strict=True):
            trend.begin((reading.seconds, value) for reading in readings if (value := each(reading)) is not None)

    def begin(self, *, keys: bool) -> None:
        """Show it; ``keys``: standard input is ours."""
        self._keys = keys
        self._screen.begin(self._picture, self._typed if keys else None)
        self._tick()

    def close(self) -> None:
        """Ask no more; what is drawn stays."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._gpus.close()

    def update(self, status: Status) -> None:
        """Show how the job has ended."""
        if self._now is not None:
            self._now = replace(self._now, status=status)
            self._screen.refresh()

    def hear(self, found: JobInspected) -> None:
        """Show the answer to an inspection."""
        self._asked, self._note, self._suspended = 0.0, "", False
        if self._over:
            return
        if self._now is not None:
            self._before = self._now if self._now.status.attempt == found.status.attempt else None
        inspection = steady(found.inspection, self._before.inspection if self._before else None)
        self._now = moment(JobInspected(found.status, inspection, found.said))
        self._judge(inspection)
        self._measure(self._snapshot(self._now))
        self._screen.refresh()

    def _measure(self, seen: Snapshot) -> None:
        """Note what there are trends of."""
        busy = [gpu.busy for gpu in seen.gpus or () if gpu.busy is not None]
        cpus = work(seen)
        figures = (rate(seen), sum(cpus.values()) * 100 if cpus else None, sum(busy) / len(busy) if busy else None)
        for trend, figure in zip(self._trends.values(), figures, strict=True):
            if figure is not None:
                trend.add(figure)

    def _hear_pace(self, found: JobInspected) -> None:
        self._pace = found.inspection.pace
        self._late = {each.rank: each.late for each in found.inspection.ranks if each.late is not None}

    def _judge(self, inspection: Inspection) -> None:
        """Say who waits for whom as long as they do."""
        found = waiting(inspection)
        if any(rank.threads for rank in inspection.ranks):
            self._places = {each.rank: place_of(each) for each in inspection.ranks}
            self._waits, self._sentences = found, sentences(inspection)
        elif found != self._waits:
            self._waits, self._sentences, self._closely = frozenset(), (), 0.0 if found else self._closely

    def _detail(self, now: float) -> Detail:
        """Inspect closely only where ranks wait, or the full screen says where they are: it interrupts them."""
        told = self._screen.is_full and self._now is not None and self._now.inspection.world_size <= SHOWN_CLOSELY
        if self._now is None or now < self._closely or not (told or waiting(self._now.inspection)):
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
            self._job.inspect(Detail.PACE, self._hear_pace)
        if not self._asked:
            self._asked = now
            self._job.inspect(self._detail(now), self.hear, lines=self._screen.is_full)
        elif advice := self._job.advice_to_continue():
            self._note, self._suspended = f"suspended: {advice}", True
            self._now = self._now and stopped(self._now)
            self._screen.refresh()
        elif now - self._asked > 2 * EVERY:
            self._note, self._suspended = f"no answer for {now - self._asked:.0f} s", False
            self._screen.refresh()

    # --------------------------------------------------------------------------------------------------- the picture

    def _picture(self, columns: int, rows: int, full: bool) -> list[Row]:
        prompt = [cut((Span(f"{self._prompt[0]}: {self._prompt[1]}_", "1"),), columns - 1)] if self._prompt else []
        if self._note:
            prompt.insert(0, cut((Span(self._note, "1;33"),), columns - 1))
        if self._now is None:
            return prompt
        if full and self._page:
            (text, first), rows = self._page, rows - len(prompt)
            lines = [row for line in text.split("\n") for row in styled(line, columns - 1)]
            self._page = text, first = text, max(0, min(first, len(lines) - rows + 1))
            body = lines[first : first + rows - 1]
            return [*body, *[()] * (rows - 1 - len(body)), cut((Span(PAGE_HINT, "2"),), columns - 1), *prompt]
        draw = screenful if full else frame
        return [*draw(self._snapshot(self._now), columns, max(1, rows - len(prompt))), *prompt]

    def _snapshot(self, now: Moment) -> Snapshot:
        if now.status.state is State.ENDED:
            return Snapshot(replace(now, used={}), chosen=self._chosen)
        hint = HINT.replace("o order", f"o order: {self._order}" if self._order else "o order") if self._keys else ""
        if self._suspended:
            return Snapshot(replace(now, used={}), chosen=self._chosen, hint=hint, cursor=self._cursor, suspended=True)
        said = self._sentences or self._pace
        table = self._places, self._late, self._trends, self._order, self._cursor
        return Snapshot(now, self._before, self._gpus_of(now), said, self._chosen, hint, *table)

    def _gpus_of(self, now: Moment) -> tuple[GpuUsage, ...] | None:
        return used_by_ranks(self._gpus.usage, {rank.pid for rank in now.status.ranks})

    # ------------------------------------------------------------------------------------------------------- the keys

    def _typed(self, key: str) -> None:
        if self._prompt is not None:
            return self._answered(*self._prompt, key)
        if key in _STEPS and self._screen.is_full:
            return self._step(_STEPS[key])
        match key:
            case "q":
                self._left()
            case "s":
                self._job.inspect(Detail.WAITS, lambda found: self._print(render_stacks(found.inspection)))
            case "l":
                self._prompt = ("rank", "")
            case "f":
                self._job.failures(self._print)
            case "/":
                self._prompt = ("filter: 0,3-5, or a word like waiting", "")
            case "d" if self._other and self._cursor is not None:
                self._other("debug", "--rank", str(self._cursor))
            case "p" if self._other:
                self._other("profile", "--seconds", "5")
            case "x":
                self._prompt = ("stop the job? y or n", "")
            case "o" if self._screen.is_full:
                self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)] if self._order else ORDERS[1]
            case "z":
                self._screen.full_screen(not self._screen.is_full)
            case "?":
                self._print(help_text())
            case _ if key == ENTER and self._cursor is not None and self._screen.is_full:
                self._job.inspect(Detail.STACKS, partial(self._print_stack, self._cursor))
            case _ if key == ESCAPE and self._page:
                self._page = None
            case _ if key == ESCAPE:
                self._screen.full_screen(False)
        self._screen.refresh()

    def _step(self, step: int) -> None:
        """Scroll the text that is shown, or choose another rank."""
        if self._page:
            self._page = self._page[0], max(0, self._page[1] + step)
        elif self._now is not None:
            seen = self._snapshot(self._now)
            ranks = [each.rank.rank for each in table_rows(seen, all_doing(seen))]
            at = ranks.index(self._cursor) + step if self._cursor in ranks else 0
            self._cursor = ranks[max(0, min(at, len(ranks) - 1))] if ranks else None
        self._screen.refresh()

    def _print(self, text: str) -> None:
        """Show a text that was asked for: in the full screen, or where it can be scrolled back to."""
        if not self._screen.is_full:
            return self._screen.page(text)
        self._page = text.rstrip("\n"), 0
        self._screen.refresh()

    def _print_stack(self, rank: int, found: JobInspected) -> None:
        ranks = tuple(replace(each, groups=(), inside=None) for each in found.inspection.ranks if each.rank == rank)
        *_, stack = render_stacks(replace(found.inspection, ranks=ranks, silent=())).partition("\n\n")
        self._print(stack or "the rank has no process\n")

    def _answered(self, question: str, typed: str, key: str) -> None:
        """Act on a key while something is asked for."""
        self._prompt = None
        if question.startswith("stop"):
            if key == "y":
                self._job.stop()
        elif key == ENTER:
            if question != "rank":
                self._chosen = typed.strip()
            elif typed and {*typed} <= _DIGITS:
                self._job.log(int(typed), self._print)
            elif self._cursor is not None:
                self._job.log(self._cursor, self._print)
        elif key != ESCAPE:
            longer = typed + key * (key.isprintable() and len(key) == 1)
            self._prompt = (question, typed[:-1] if key == BACKSPACE else longer)
        self._screen.refresh()


class OwnView:
    """The view of ``run --ui``, below the job's own log: an observer, which shows it until the job ends, or ``q``."""

    def __init__(self, loop: Loop, screen: LiveScreen, job: ServedJob) -> None:
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

    def inspect(self, detail: Detail, answer: Callable[[JobInspected], None], *, lines: bool = False) -> None:
        def inspected(inspection: Inspection) -> None:
            answer(JobInspected(self._job.status(), inspection, last_of(self._job) if lines else ()))

        self._job.inspect(detail, inspected)

    def stop(self) -> None:
        self._job.stop(False)

    def log(self, rank: int, answer: Callable[[str], None]) -> None:
        answer(last_lines(rank, self._job.printed(rank)))

    def failures(self, answer: Callable[[str], None]) -> None:
        earlier = "".join(render_verdict(each, self._nnodes) for each in self._verdicts)
        answer(earlier + failures_text(self._job.status()))

    def advice_to_continue(self) -> str:
        return ""  # a launcher that draws runs

    def _leave(self) -> None:
        self._view.close()
        self._screen.end()


def _rate(reading: Reading) -> float | None:
    return max((each.collectives for each in reading.ranks if each.collectives is not None), default=None)


def _cpus(reading: Reading) -> float:
    return 100 * sum(each.cpus or 0.0 for each in reading.ranks)


def _busy(reading: Reading) -> float | None:
    busy = [each.busy for each in reading.gpus if each.busy is not None]
    return sum(busy) / len(busy) if busy else None


def moment(found: JobInspected) -> Moment:
    """Add to an answer what the ranks of this machine use."""
    pids = {rank.rank: rank.pid for rank in found.status.ranks if rank.pid and rank.code is None}
    used = {rank: used for rank, pid in pids.items() if (used := used_by(pid))}
    return Moment(found.status, found.inspection, used, dict(found.said))


def stopped(now: Moment) -> Moment:
    """The same, with the ranks of this machine that a signal has stopped since."""
    pids = {rank.rank: rank.pid for rank in now.status.ranks if rank.pid and rank.code is None}
    ranks = tuple(
        replace(each, condition=Condition.STOPPED) if is_suspended(pids.get(each.rank, 0)) else each
        for each in now.inspection.ranks
    )
    return replace(now, inspection=replace(now.inspection, ranks=ranks))


def sentences(inspection: Inspection) -> tuple[str, ...]:
    """Who waits for whom, if any rank does."""
    return tuple(sentence(wait, inspection) for wait in waits(inspection))


def help_text() -> str:
    """What the keys do, and what the marks mean."""
    keys = (
        ("s", "stacks: where each rank is (ddplaunch stacks)"),
        ("l", "log: the last lines of a rank (ddplaunch logs)"),
        ("f", "failures so far (ddplaunch report)"),
        ("/", "filter: 0,3-5, or a word like waiting (ddplaunch top --ranks)"),
        ("z", "full screen and back; Esc goes back too"),
        ("Up, Down", "choose a rank; Enter: its stack, l Enter: its log"),
        ("p", "profile: where the ranks spend the next 5 seconds (ddplaunch profile)"),
        ("d", "debugger of the chosen rank (ddplaunch debug); not with --ui, nor p"),
        ("o", f"order of the ranks: {', '.join(ORDERS)}"),
        ("x", "stop the job (ddplaunch stop)"),
        ("q", "leave the view; the job runs on"),
    )
    marks = ((what.sign, f"{what.word}: {what.meaning}") for what in Doing)
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
