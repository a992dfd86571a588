"""The live view of a job, of this launcher or another one: inspects it once a second, draws it, and handles keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from ddplaunch.base.errors import escape_control_chars
from ddplaunch.base.event_loop import EventLoop, Timer
from ddplaunch.base.tty import BACKSPACE, ENTER, ESCAPE
from ddplaunch.cli.failure_text import render_verdict
from ddplaunch.core.control_socket.job_status import JobState, Status
from ddplaunch.core.control_socket.request import ServedJob
from ddplaunch.core.events import AttemptPlanned, Event, JobEnded, Restarting, SignalReceived
from ddplaunch.core.failures import FailureReport
from ddplaunch.core.feature import NodeSide
from ddplaunch.features.live.frame import build_table_rows, render_footer, render_full_screen
from ddplaunch.features.live.live_screen import LiveScreen
from ddplaunch.features.live.rank_table import SORT_KEYS
from ddplaunch.features.live.styled_rows import Row, StyledText, truncate_row, wrap_styled_line
from ddplaunch.features.live.view_state import (
    JobSnapshot,
    RankActivity,
    TrendLine,
    ViewState,
    WaitPoint,
    busy_cpus_by_rank,
    collectives_per_second,
    correct_completed_counts,
    describe_location,
    find_program_gpus,
    mark_moved,
    rank_activities,
    waiting_ranks,
)
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection, ProcessCondition
from ddplaunch.observe.diagnosis.wait_sentences import describe_wait
from ddplaunch.observe.diagnosis.waits import find_waits
from ddplaunch.observe.request import JobInspection, make_job_inspection
from ddplaunch.observe.rpc import inspect_job
from ddplaunch.observe.samples.sample import GpuSample, NodeSample
from ddplaunch.observe.stacks_text import render_stacks
from ddplaunch.system.devices.gpu_usage import GpuUsage, GpuUsageQuery, gpus_used_by
from ddplaunch.system.devices.process_usage import read_tree_usage
from ddplaunch.system.processes.proc_utils import is_suspended

REFRESH_INTERVAL_S = 1.0  # between two inspections
LATENESS_INTERVAL_S = 30.0  # between two inspections of lateness, which take up to 0.4 s of each rank
LATENESS_DELAY_S = 10.0  # before the first of them
LOG_LINES = 20  # of a rank's log
STACK_INTERVAL_S = 5.0  # between two inspections with stacks
MAX_LOCATED_RANKS = 64  # with at most so many ranks, the full screen shows the line of each
HINT = "? help  q quit  s stacks  l log  Enter stack  o order  / filter  x stop"
PAGE_HINT = "Esc back  Up, Down"
UP, DOWN, PAGE_UP, PAGE_DOWN = ("\x1b[A", "\x1bOA", "k"), ("\x1b[B", "\x1bOB", "j"), ("\x1b[5~",), ("\x1b[6~", " ")
_SCROLL_STEPS = {key: step for keys, step in ((UP, -1), (DOWN, 1), (PAGE_UP, -10), (PAGE_DOWN, 10)) for key in keys}
_DIGITS = frozenset("0123456789")


class JobSource(Protocol):
    """The job that a live view shows. Its replies come later, or never if the job has ended."""

    def inspect(self, detail: Detail, on_reply: Callable[[JobInspection], None], *, lines: bool = False) -> None:
        """Inspect the ranks; ``lines``: with the last output line of each."""

    def stop(self) -> None:
        """Stop the job as Ctrl-C does."""

    def log(self, rank: int, on_reply: Callable[[str], None]) -> None:
        """Request the last output lines of a rank, as text."""

    def failures(self, on_reply: Callable[[str], None]) -> None:
        """Request a text about the ranks that have failed so far."""

    def advice_to_continue(self) -> str:
        """Return a hint on how to continue a suspended job; "" if the job is not suspended."""


class LiveView:
    """Draws the live view of a job until ``close`` is called, or the user types ``q``."""

    def __init__(
        self,
        loop: EventLoop,
        screen: LiveScreen,
        job: JobSource,
        *,
        filter_text: str = "",
        on_quit: Callable[[], None],
        run_command: Callable[..., None] | None = None,
    ) -> None:
        """``on_quit`` is called when the user leaves the view.

        ``run_command(*arguments)`` gives the terminal to another command until it ends.
        """
        self._loop, self._screen, self._job, self._on_quit, self._run_command = loop, screen, job, on_quit, run_command
        self._gpus = GpuUsageQuery(loop)
        self._snapshot: JobSnapshot | None = None
        self._previous: JobSnapshot | None = None  # the one before, if it is of the same attempt
        self._request_at = 0.0  # when the open request was sent; 0 without one
        self._waits: frozenset[tuple[int, WaitPoint]] = frozenset()  # described by the sentences
        self._sentences: tuple[str, ...] = ()
        self._awaited: frozenset[int] = frozenset()  # the ranks for which others wait, by these sentences
        self._stacks_due = 0.0
        self._lateness_sentences: tuple[str, ...] = ()
        self._lateness_due = time.monotonic() + LATENESS_DELAY_S
        self._timer: Timer | None = None
        self._filter_text = filter_text
        self._prompt: tuple[str, str] | None = None  # the question, and the input so far
        self._has_keys = False
        self._closed = False
        self._note = ""  # why the view is not current
        self._suspended = False
        self._locations: dict[int, str] = {}
        self._lateness_s: dict[int, float] = {}
        self._trends = {name: TrendLine() for name in ("collectives/s", "CPU %", "GPU %")}
        self._sort_by = ""
        self._cursor: int | None = None
        self._page: tuple[str, int] | None = None  # a text shown in the full screen, and its first row

    def add_earlier_samples(self, samples: Sequence[NodeSample]) -> None:
        """Add earlier samples to the beginning of the trend lines."""
        before = [(sample.seconds, *_trend_values(sample)) for sample in samples]
        for place, trend in enumerate(self._trends.values(), 1):
            trend.seed((each[0], value) for each in before if (value := each[place]) is not None)

    def start(self, *, keys: bool) -> None:
        """Show the view; ``keys``: whether it reads keys from standard input."""
        self._has_keys = keys
        self._screen.begin(self._render, self._on_key if keys else None)
        self._on_timer()

    def close(self) -> None:
        """Stop inspecting the job; the drawn rows stay."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._gpus.close()

    def update(self, status: Status) -> None:
        """Show the final status."""
        if self._snapshot is not None:
            self._snapshot = replace(self._snapshot, status=status)
            self._screen.refresh()

    def on_inspection(self, reply: JobInspection) -> None:
        """Called with the reply to an inspection: show it."""
        self._request_at, self._note, self._suspended = 0.0, "", False
        if self._closed:
            return
        if self._snapshot is not None:
            self._previous = self._snapshot if self._snapshot.status.attempt == reply.status.attempt else None
        before = self._previous.inspection if self._previous else None
        inspection = mark_moved(correct_completed_counts(reply.inspection, before), before)
        self._snapshot = to_job_snapshot(JobInspection(reply.status, inspection, reply.last_lines))
        self._update_sentences(inspection)
        self._update_trends(self._build_state(self._snapshot))
        self._screen.refresh()

    def _update_trends(self, seen: ViewState) -> None:
        """Add the current values to the trends."""
        cpus = busy_cpus_by_rank(seen)
        cpu_percent = sum(cpus.values()) * 100 if cpus else None
        values = (collectives_per_second(seen), cpu_percent, _mean_gpu_busy(seen.gpus or ()))
        for trend, value in zip(self._trends.values(), values, strict=True):
            if value is not None:
                trend.add(value)

    def _on_lateness_reply(self, found: JobInspection) -> None:
        self._lateness_sentences = found.inspection.pace
        self._lateness_s = {each.rank: each.late for each in found.inspection.ranks if each.late is not None}

    def _update_sentences(self, inspection: Inspection) -> None:
        """Update the sentences on waits, and remove them once the waits have changed."""
        waits = waiting_ranks(inspection)
        if any(rank.threads for rank in inspection.ranks):
            self._locations = {each.rank: describe_location(each) for each in inspection.ranks}
            self._waits, (self._sentences, self._awaited) = waits, describe_waiting(inspection)
        elif waits != self._waits:
            self._waits, self._sentences, self._awaited = frozenset(), (), frozenset()
            self._stacks_due = 0.0 if waits else self._stacks_due

    def _choose_detail(self, now: float) -> Detail:
        """Choose the detail of the next inspection: stacks only if ranks wait or locations are shown."""
        if self._snapshot is None or now < self._stacks_due:
            return Detail.STATE
        inspection = self._snapshot.inspection
        shows_locations = self._screen.is_full_screen and inspection.world_size <= MAX_LOCATED_RANKS
        if not (shows_locations or waiting_ranks(inspection)):
            return Detail.STATE
        self._stacks_due = now + STACK_INTERVAL_S
        return Detail.WAITS

    def _on_timer(self) -> None:
        if self._closed:
            return
        self._timer = self._loop.call_later(REFRESH_INTERVAL_S, self._on_timer)
        self._gpus.query()
        now = time.monotonic()
        if now > self._lateness_due and not self._waits:
            self._lateness_due = now + LATENESS_INTERVAL_S
            self._job.inspect(Detail.LATENESS, self._on_lateness_reply)
        if not self._request_at:
            self._request_at = now
            self._job.inspect(self._choose_detail(now), self.on_inspection, lines=self._screen.is_full_screen)
        elif advice := self._job.advice_to_continue():
            self._note, self._suspended = f"suspended: {advice}", True
            self._snapshot = self._snapshot and mark_suspended(self._snapshot)
            self._screen.refresh()
        elif now - self._request_at > 2 * REFRESH_INTERVAL_S:
            self._note, self._suspended = f"no answer for {now - self._request_at:.0f} s", False
            self._screen.refresh()

    # --------------------------------------------------------------------------------------------------- the picture

    def _render(self, columns: int, rows: int, full: bool) -> list[Row]:
        texts = [StyledText(self._note, "1;33")] if self._note else []
        if self._prompt:
            texts.append(StyledText(f"{self._prompt[0]}: {self._prompt[1]}_", "1"))
        prompt = [truncate_row((text,), columns - 1) for text in texts]
        if self._snapshot is None:
            return prompt
        if full and self._page:
            (text, first), rows = self._page, rows - len(prompt)
            lines = [row for line in text.split("\n") for row in wrap_styled_line(line, columns - 1)]
            self._page = text, first = text, max(0, min(first, len(lines) - rows + 1))
            body = lines[first : first + rows - 1]
            hint = truncate_row((StyledText(PAGE_HINT, "2"),), columns - 1)
            return [*body, *[()] * (rows - 1 - len(body)), hint, *prompt]
        draw = render_full_screen if full else render_footer
        return [*draw(self._build_state(self._snapshot), columns, max(1, rows - len(prompt))), *prompt]

    def _build_state(self, now: JobSnapshot) -> ViewState:
        if now.status.state is JobState.ENDED:
            return ViewState(replace(now, usage={}), filter_text=self._filter_text)
        order = f"o order: {self._sort_by}" if self._sort_by else "o order"
        hint = HINT.replace("o order", order) if self._has_keys else ""
        if self._suspended:
            unused, text = replace(now, usage={}), self._filter_text
            return ViewState(unused, filter_text=text, hint=hint, cursor=self._cursor, suspended=True)
        own = find_program_gpus(now.inspection.programs, self._gpus.usage or ())
        taken = {gpu for gpus in own.values() for gpu in gpus}
        others = self._gpus.usage and tuple(gpu for gpu in self._gpus.usage if gpu not in taken)
        gpus = gpus_used_by(others, {rank.pid for rank in now.status.ranks})
        texts = self._sentences or self._lateness_sentences
        table = self._locations, self._lateness_s, self._trends, self._sort_by, self._cursor
        return ViewState(now, self._previous, gpus, texts, self._awaited, self._filter_text, hint, *table, own)

    # ------------------------------------------------------------------------------------------------------- the keys

    def _on_key(self, key: str) -> None:
        if self._prompt is not None:
            return self._on_prompt_key(*self._prompt, key)
        if key in _SCROLL_STEPS and self._screen.is_full_screen:
            return self._move_cursor(_SCROLL_STEPS[key])
        match key:
            case "q":
                self._on_quit()
            case "s":
                self._job.inspect(Detail.WAITS, lambda found: self._show_text(render_stacks(found.inspection)))
            case "l":
                self._prompt = ("rank", "")
            case "f":
                self._job.failures(self._show_text)
            case "/":
                self._prompt = ("filter: 0,3-5, or a word like waiting", "")
            case "d" if self._run_command and self._cursor is not None:
                self._run_command("debug", "--rank", str(self._cursor))
            case "p" if self._run_command:
                self._run_command("profile", "--seconds", "5")
            case "x":
                self._prompt = ("stop the job? y or n", "")
            case "o" if self._screen.is_full_screen:
                self._sort_by = SORT_KEYS[(SORT_KEYS.index(self._sort_by or SORT_KEYS[0]) + 1) % len(SORT_KEYS)]
            case "z":
                self._screen.set_full_screen(not self._screen.is_full_screen)
            case "?":
                self._show_text(help_text())
            case _ if key == ENTER and self._cursor is not None and self._screen.is_full_screen:
                self._job.inspect(Detail.STACKS, partial(self._show_stack, self._cursor))
            case _ if key == ESCAPE and self._page:
                self._page = None
            case _ if key == ESCAPE:
                self._screen.set_full_screen(False)
        self._screen.refresh()

    def _move_cursor(self, step: int) -> None:
        """Scroll the text that is shown, or move the cursor to another rank."""
        if self._page:
            self._page = self._page[0], max(0, self._page[1] + step)
        elif self._snapshot is not None:
            seen = self._build_state(self._snapshot)
            ranks = [each.rank.rank for each in build_table_rows(seen, rank_activities(seen))]
            at = ranks.index(self._cursor) + step if self._cursor in ranks else 0
            self._cursor = ranks[max(0, min(at, len(ranks) - 1))] if ranks else None
        self._screen.refresh()

    def _show_text(self, text: str) -> None:
        """Show a text that the user requested: in the full screen if that is on, else in the log."""
        if not self._screen.is_full_screen:
            return self._screen.print_text(text)
        self._page = text.rstrip("\n"), 0
        self._screen.refresh()

    def _show_stack(self, rank: int, found: JobInspection) -> None:
        ranks = tuple(replace(each, groups=(), inside=None) for each in found.inspection.ranks if each.rank == rank)
        *_, stack = render_stacks(replace(found.inspection, ranks=ranks, silent=())).partition("\n\n")
        self._show_text(stack or "the rank has no process\n")

    def _on_prompt_key(self, question: str, typed: str, key: str) -> None:
        """Handle a key that answers the question on the screen."""
        self._prompt = None
        if question.startswith("stop"):
            if key == "y":
                self._job.stop()
        elif key == ENTER:
            if question != "rank":
                self._filter_text = typed.strip()
            elif typed and {*typed} <= _DIGITS:
                self._job.log(int(typed), self._show_text)
            elif self._cursor is not None:
                self._job.log(self._cursor, self._show_text)
        elif key != ESCAPE:
            longer = typed + key * (key.isprintable() and len(key) == 1)
            self._prompt = (question, typed[:-1] if key == BACKSPACE else longer)
        self._screen.refresh()


class EmbeddedView(NodeSide):
    """The view of ``run --ui``, below the job's own log, until the job ends or the user types ``q``."""

    def __init__(self, loop: EventLoop, screen: LiveScreen, job: ServedJob) -> None:
        self._screen, self._job = screen, job
        self._view = LiveView(loop, screen, self, on_quit=self._close_view)
        self._verdicts: list[FailureReport] = []  # of the attempts that have failed
        self._nnodes = 1
        loop.call_soon(lambda: self._view.start(keys=True))  # after the terminal's settings are saved

    def observe(self, event: Event) -> None:
        if isinstance(event, AttemptPlanned):
            self._nnodes = event.plan.nnodes
        if isinstance(event, SignalReceived):
            self._screen.set_full_screen(False)  # messages about the end of the job are in the log
        if isinstance(event, Restarting) and event.verdict:
            self._verdicts.append(event.verdict)
        if isinstance(event, JobEnded):
            self._view.close()
            self._view.update(self._job.status())

    def close(self) -> None:
        """Release the terminal, also after an error."""
        self._view.close()
        self._screen.close()

    def inspect(self, detail: Detail, on_reply: Callable[[JobInspection], None], *, lines: bool = False) -> None:
        def on_inspected(inspection: Inspection) -> None:
            on_reply(make_job_inspection(self._job, inspection, lines=lines))

        inspect_job(self._job.rpc, detail, on_inspected)

    def stop(self) -> None:
        self._job.stop(False)

    def log(self, rank: int, on_reply: Callable[[str], None]) -> None:
        on_reply(format_last_lines(rank, self._job.streams.tail(rank)))

    def failures(self, on_reply: Callable[[str], None]) -> None:
        earlier = "".join(render_verdict(each, self._nnodes) for each in self._verdicts)
        on_reply(earlier + format_failures(self._job.status()))

    def advice_to_continue(self) -> str:
        return ""  # the launcher draws, so it is not suspended

    def _close_view(self) -> None:
        self._view.close()
        self._screen.end()


def _trend_values(sample: NodeSample) -> tuple[float | None, float | None, float | None]:
    """Return collectives per second, CPU % and GPU %; None where unknown."""
    rate = max((each.collectives for each in sample.ranks if each.collectives is not None), default=None)
    return rate, 100 * sum(each.cpus or 0.0 for each in sample.ranks), _mean_gpu_busy(sample.gpus)


def _mean_gpu_busy(gpus: Sequence[GpuUsage | GpuSample]) -> float | None:
    busy = [each.busy for each in gpus if each.busy is not None]
    return sum(busy) / len(busy) if busy else None


def to_job_snapshot(reply: JobInspection) -> JobSnapshot:
    """Build a snapshot from an inspection, with the usage of the ranks on this machine."""
    pids = {rank.rank: rank.pid for rank in reply.status.ranks if rank.pid and rank.code is None}
    used = {rank: used for rank, pid in pids.items() if (used := read_tree_usage(pid))}
    return JobSnapshot(reply.status, reply.inspection, used, dict(reply.last_lines))


def mark_suspended(now: JobSnapshot) -> JobSnapshot:
    """Mark the ranks of this machine that a signal has stopped since the snapshot."""
    pids = {rank.rank: rank.pid for rank in now.status.ranks if rank.pid and rank.code is None}
    ranks = tuple(
        replace(each, condition=ProcessCondition.STOPPED) if is_suspended(pids.get(each.rank, 0)) else each
        for each in now.inspection.ranks
    )
    return replace(now, inspection=replace(now.inspection, ranks=ranks))


def describe_waiting(inspection: Inspection) -> tuple[tuple[str, ...], frozenset[int]]:
    """Return sentences on which ranks wait for which, one for each wait, and the set of ranks that are awaited."""
    waits = find_waits(inspection)
    awaited = frozenset(rank for wait in waits for rank in wait.root_causes)
    return tuple(describe_wait(wait, inspection) for wait in waits), awaited


def help_text() -> str:
    """Return the help on the keys, and on the signs for what ranks do."""
    keys = (
        ("s", "stacks: where each rank is (ddplaunch stacks)"),
        ("l", "log: the last lines of a rank (ddplaunch logs)"),
        ("f", "failures so far (ddplaunch report)"),
        ("/", "filter: 0,3-5, or a word like waiting (ddplaunch top --rank)"),
        ("z", "full screen and back; Esc goes back too"),
        ("Up, Down", "choose a rank. Enter: its stack. l Enter: its log."),
        ("p", "profile: where the ranks spend the next 5 seconds (ddplaunch profile)"),
        ("d", "debugger of the chosen rank (ddplaunch debug). d and p do not work with --ui."),
        ("o", f"order of the ranks: {', '.join(SORT_KEYS)}"),
        ("x", "stop the job (ddplaunch stop)"),
        ("q", "quit this view; the job continues"),
    )
    marks = ((what.sign, f"{what.word}: {what.meaning}" if what.meaning else what.word) for what in RankActivity)
    return "".join(f"  {mark}  {text}\n" for mark, text in (*keys, *marks))


def format_failures(status: Status) -> str:
    """Format the failed ranks of this node."""
    failed = [(rank, rank.code) for rank in status.ranks if rank.code]
    if not failed:
        return "ddplaunch: no rank has failed\n"
    return "".join(
        f"ddplaunch: rank {rank.rank} (pid {rank.pid}): {f'signal {-code}' if code < 0 else f'exit code {code}'}\n"
        for rank, code in failed
    )


def format_last_lines(rank: int, data: bytes) -> str:
    """Format the last output lines of a rank, as ``ddplaunch logs`` shows them."""
    lines = data.decode(errors="replace").rstrip("\n").split("\n")[-LOG_LINES:]
    if not data:
        return f"ddplaunch: rank {rank} has no output in memory on this node\n"
    last_states = (line.rstrip("\r").rpartition("\r")[2] for line in lines)  # of a progress bar
    return "".join(f"[{rank}] {escape_control_chars(line)}\n" for line in last_states)
