"""The harness of the benchmarks: the commands that are compared, a job that is measured, and the table of results.

The benchmark process is the subreaper of what it runs, so a process that a launcher leaves behind becomes its child,
and the CPU time of its children is that of the whole job. Contenders take turns in each round, so a ratio compares
measurements of the same minute.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

PROGRAMS = Path(__file__).parent / "programs"
BIN = Path(sys.executable).parent
DDPLAUNCH, TORCHRUN, SPAWN, IMPORT, PLAIN = "ddplaunch", "torchrun", "mp.spawn", "import torch", "plain python"
"""Names of contenders."""

TIMEOUT_S = 120.0
"""After which a job counts as hung."""

LEFTOVERS_TIMEOUT_S = 20.0
"""How long processes may outlive the launcher before they count as left behind."""

_POLL_S = 0.002
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")
"""The variables that a job inherits: others would change what a contender does."""

Values = dict[str, float]
Turn = Callable[[], Values]
"""Runs one job of one contender, and returns numbers by name."""

Launcher = Callable[[int, str], list[str]]
"""Takes a number of ranks and a program's name in PROGRAMS; returns the command line."""


class BenchmarkError(Exception):
    """A contender failed to run what was to be measured."""


# --------------------------------------------------------------------------------------------------------- contenders


def ddplaunch(*options: str) -> Launcher:
    return lambda ranks, program: [f"{BIN}/ddplaunch", "run", *options, "--nproc", str(ranks), f"{PROGRAMS}/{program}"]


def torchrun(*options: str) -> Launcher:
    command = [f"{BIN}/torchrun", "--standalone", *options]
    return lambda ranks, program: [*command, f"--nproc-per-node={ranks}", f"{PROGRAMS}/{program}"]


def spawn(ranks: int, program: str) -> list[str]:
    """The command of torch.multiprocessing.spawn."""
    return [sys.executable, f"{PROGRAMS}/start_by_spawn.py", str(ranks), f"{PROGRAMS}/{program}"]


def plain(program: str) -> list[str]:
    """The command of one process of plain python."""
    return [sys.executable, f"{PROGRAMS}/{program}"]


LAUNCHERS: dict[str, Launcher] = {DDPLAUNCH: ddplaunch(), TORCHRUN: torchrun(), SPAWN: spawn}
"""Each with its ordinary options."""

# ---------------------------------------------------------------------------------------------------------- processes


def _set_subreaper(enabled: bool) -> None:
    """Become the parent of every descendant that loses its own, or stop that."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def list_descendants(pid: int | None = None) -> list[psutil.Process]:
    """List the descendants of this process, or of ``pid``, without zombies."""
    found = []
    for each in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def _kill_descendants() -> None:
    """Kill all descendants, for ten seconds at most, and reap them."""
    deadline = time.monotonic() + 10
    while (left := list_descendants()) and time.monotonic() < deadline:
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        time.sleep(0.005)
    with suppress(ChildProcessError):
        for _ in _reap_children():
            pass


def read_cpu_ms(pid: int) -> float:
    """CPU milliseconds of the threads of a process; from the scheduler's nanoseconds, not from ticks."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e6


def _reap_children() -> Iterator[tuple[int, int]]:
    """Reap the children that have ended; yield pid and status of each. ChildProcessError if no child is left."""
    while (child := os.waitpid(-1, os.WNOHANG))[0]:
        yield child


# ---------------------------------------------------------------------------------------------------------------- job


@dataclass(frozen=True)
class Mark:
    """A line from programs/marks.py: the point that a rank has reached."""

    what: str
    rank: int
    attempt: int
    pid: int
    time: float


class Job:
    """Launchers that run, most often one; a context manager that leaves no process behind.

    Attributes:
        launchers: in the order of their start.
        started_at: when the first was started (as time.monotonic, like the other two).
        exited_at: when the last launcher had exited. all_exited_at: when the last descendant had.
    """

    def __init__(
        self,
        *commands: list[str],
        variables: Mapping[str, str] | None = None,
        hold: bool = False,
        output: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start ``commands`` with ``variables`` on top of a clean environment, their stdout in the file ``output``.

        Their home is empty. With a ``folder``, which is not removed, processes of the job may stay for the next one.
        """
        self.launchers: list[subprocess.Popen[bytes]] = []
        self.marks: list[Mark] = []
        self.exited_at: float | None = None
        self.all_exited_at: float | None = None
        self._partial = b""
        self._temporary = tempfile.TemporaryDirectory(prefix="benchmark-")
        self._folder = folder or Path(self._temporary.name)
        report, release = self._folder / "report", self._folder / "release"
        for pipe in (report, release):
            pipe.unlink(missing_ok=True)
            os.mkfifo(pipe)
        self._report = os.open(report, os.O_RDWR | os.O_NONBLOCK)  # as a writer too, so that it never ends
        self._open = [self._report, os.open(release, os.O_RDWR)]
        (self._folder / "home").mkdir(exist_ok=True)
        self._environment = {
            **{name: os.environ[name] for name in _INHERITED if name in os.environ},
            "TMPDIR": str(self._folder),
            "HOME": str(self._folder / "home"),
            "BENCH_REPORT": str(report),
            "BENCH_RELEASE": str(release),
            "BENCH_HOLD": "1" if hold else "",
            **(variables or {}),
        }
        _set_subreaper(folder is None)
        self._cpu_before = _read_children_cpu_s()
        self.started_at = time.monotonic()
        for command in commands:
            self.start(command, output)

    def start(self, command: list[str], output: Path | None = None) -> None:
        """Start a launcher."""
        stderr = self._folder / f"stderr.{len(self.launchers)}"
        with stderr.open("wb") as err, open(output or os.devnull, "wb") as out:
            launcher = subprocess.Popen(
                command, env=self._environment, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        self.launchers.append(launcher)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        _kill_descendants()
        for launcher in self.launchers:
            launcher.returncode = -9 if launcher.returncode is None else launcher.returncode  # reaped here
        for fd in self._open:
            os.close(fd)
        self._temporary.cleanup()

    @property
    def duration_s(self) -> float:
        """Seconds from the start to the exit of the last launcher."""
        assert self.exited_at is not None
        return self.exited_at - self.started_at

    @property
    def cpu_s(self) -> float:
        """Seconds of user and system time of all its processes that have ended."""
        return _read_children_cpu_s() - self._cpu_before

    def stderr(self, launcher: int = 0) -> str:
        """The stderr of a launcher so far."""
        return (self._folder / f"stderr.{launcher}").read_text(errors="replace")

    def times(self, what: str, attempt: int = 0) -> list[float]:
        return [mark.time for mark in self.marks if mark.what == what and mark.attempt == attempt]

    def pids(self, what: str) -> dict[int, int]:
        """By rank: the pid of the process that has reached ``what`` in the first attempt."""
        return {mark.rank: mark.pid for mark in self.marks if mark.what == what and mark.attempt == 0}

    def wait_for_ranks(self, what: str, ranks: int, attempt: int = 0) -> float:
        """Wait until ``ranks`` ranks have reached ``what``; return when the last one did.

        Raises:
            BenchmarkError: the launcher exited before, or timeout.
        """
        self.wait_until(lambda: len(self.times(what, attempt)) >= ranks or self.exited_at is not None)
        found = self.times(what, attempt)
        if len(found) < ranks:
            reached = f"only {len(found)} of {ranks} ranks had reached {what!r}"
            raise BenchmarkError(f"{reached} when the launcher exited: {self._last_errors()}")
        return max(found)

    def release(self) -> None:
        """Let the ranks that hold continue."""
        os.close(self._open.pop())

    def finish(self) -> int:
        """Wait until all launchers and descendants have exited; return their exit code, -N for signal N.

        Raises:
            BenchmarkError: a launcher hung or left processes behind, or their exit codes differ.
        """
        self.wait_until(lambda: self.exited_at is not None)
        try:
            self.wait_until(lambda: self.all_exited_at is not None, LEFTOVERS_TIMEOUT_S)
        except BenchmarkError:
            raise BenchmarkError(f"left behind: {', '.join(map(str, list_descendants()))}") from None
        codes = sorted({int(launcher.returncode) for launcher in self.launchers})
        if len(codes) > 1:
            raise BenchmarkError(f"exit codes {codes}: {self._last_errors()}")
        return codes[0]

    def succeed(self) -> None:
        """Wait for its end; BenchmarkError unless it succeeds."""
        if code := self.finish():
            raise BenchmarkError(f"exit code {code}: {self._last_errors()}")

    def wait_until(self, done: Callable[[], bool], timeout_s: float = TIMEOUT_S, poll_s: float = _POLL_S) -> float:
        """Wait until ``done``, and record marks and exits meanwhile; return when it was; BenchmarkError on timeout."""
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise BenchmarkError(f"timed out after {timeout_s:.0f} s: {self._last_errors()}")
            if select.select([self._report], [], [], poll_s)[0]:
                self._read_marks()
            self._reap()
        return time.monotonic()

    def _last_errors(self) -> str:
        """Return the last lines of the first launcher's stderr as one line."""
        lines = [line.strip() for line in self.stderr().splitlines() if line.strip()]
        return " / ".join(lines[-3:])[-300:] or "(nothing on stderr)"

    def _read_marks(self) -> None:
        try:
            *lines, self._partial = (self._partial + os.read(self._report, 1 << 16)).split(b"\n")
        except BlockingIOError:
            return
        for line in lines:
            what, rank, attempt, pid, *moment = line.decode().split(" ")
            at = float(moment[0]) if moment else time.monotonic()  # a shell cannot read the clock
            self.marks.append(Mark(what, int(rank), int(attempt), int(pid), at))

    def _reap(self) -> None:
        launchers = {launcher.pid: launcher for launcher in self.launchers}
        try:
            for pid, status in _reap_children():
                if pid in launchers:
                    launchers[pid].returncode = os.waitstatus_to_exitcode(status)
                    self._read_marks()
        except ChildProcessError:
            self.all_exited_at = self.all_exited_at or time.monotonic()
        if self.exited_at is None and all(launcher.returncode is not None for launcher in self.launchers):
            self.exited_at = time.monotonic()


def _read_children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# -------------------------------------------------------------------------------------------------------------- turns


def compare(turn: Callable[[Launcher], Values], *names: str, **launchers: Launcher) -> dict[str, Turn]:
    """Make the same turn for several launchers; those that are only named have their ordinary options."""
    return {name: partial(turn, launchers.get(name) or LAUNCHERS[name]) for name in (*names, *launchers)}


def measure_command(
    command: list[str], variables: Mapping[str, str] | None = None, output: Path | None = None
) -> Values:
    """Measure a whole command: seconds and CPU seconds."""
    with Job(command, variables=variables, output=output) as job:
        job.succeed()
        return {"wall": job.duration_s, "cpu": job.cpu_s}


def measure_memory(command: list[str], ranks: int) -> Values:
    """Measure the memory of a job while all its ranks hold: MB of PSS, where each of N sharers has 1/N of a page."""
    with Job(command, hold=True) as job:
        job.wait_for_ranks("held", ranks)
        memory = sum(each.memory_full_info().pss for each in list_descendants()) / 1e6
        job.release()
        job.succeed()
        return {"memory": memory}


# ------------------------------------------------------------------------------------------------------------ results


@dataclass(frozen=True)
class Size:
    """The sizes of the experiments, and the number of rounds."""

    many: int = 8
    few: int = 4
    idle_s: float = 20.0
    lines: int = 200_000
    rounds: int = 5
    warm_up: bool = True


QUICK = Size(many=2, few=2, idle_s=1.0, lines=20_000, rounds=1, warm_up=False)


@dataclass(frozen=True)
class Row:
    """One line of the table: one of a turn's numbers, and the contender whose number divides ddplaunch's."""

    what: str
    value: str
    unit: str
    over: str = ""


@dataclass
class Experiment:
    """The turns of all contenders, and their outcomes.

    Attributes:
        rounds: the most rounds, for what is slow and steady.
        outcomes: by contender: the numbers of each turn, or why it failed.
    """

    turns: dict[str, Turn]
    rows: tuple[Row, ...]
    rounds: int = 1000
    outcomes: dict[str, list[Values | str]] = field(default_factory=dict)

    def measure(self, name: str, size: Size) -> None:
        self.outcomes = {contender: [] for contender in self.turns}
        for number in range(-size.warm_up, min(size.rounds, self.rounds)):
            for contender, turn in self.turns.items():
                started_at = time.monotonic()
                outcome: Values | str
                try:
                    outcome = turn()
                    shown = ", ".join(f"{key} {value:.4g}" for key, value in outcome.items())
                except BenchmarkError as failed:
                    outcome = shown = str(failed)
                if number >= 0:
                    self.outcomes[contender].append(outcome)
                label = f"round {number + 1}" if number >= 0 else "warm-up"
                took = time.monotonic() - started_at
                print(f"{name}, {label}, {contender} ({took:.1f} s): {shown}", file=sys.stderr)

    def failures(self, contender: str) -> list[str]:
        return [outcome for outcome in self.outcomes[contender] if isinstance(outcome, str)]

    def render_row(self, row: Row) -> str:
        """Render a row in Markdown: medians, and the median, lowest and highest ratio of a round."""
        numbers = {
            contender: [None if isinstance(outcome, str) else outcome.get(row.value) for outcome in outcomes]
            for contender, outcomes in self.outcomes.items()
        }
        cells = {
            contender: f"{_format_median(known)} {row.unit}".rstrip()
            for contender, found in numbers.items()
            if (known := [each for each in found if each is not None])
        }
        others = "; ".join(f"{contender} {cell}" for contender, cell in cells.items() if contender != DDPLAUNCH)
        pairs = zip(numbers[DDPLAUNCH], numbers.get(row.over, []), strict=False)
        ratios = [one / two for one, two in pairs if one is not None and two]
        ratio = f"{_format_median(ratios)} × {row.over}" if ratios else "–"
        if len(ratios) > 1:
            ratio += f" ({format_number(min(ratios))} to {format_number(max(ratios))})"
        return f"| {row.what} | {cells.get(DDPLAUNCH, 'failed')} | {others or '–'} | {ratio} |"


def render_table(experiments: dict[str, Experiment]) -> str:
    """Render all rows, and below them why turns failed."""
    lines = ["| what | ddplaunch | others | ratio (lowest to highest) |", "|---|---|---|---|"]
    lines += [experiment.render_row(row) for experiment in experiments.values() for row in experiment.rows]
    failed = [
        f"- {name}: {contender} failed {len(why)} of {len(outcomes)} times: {why[0]}"
        for name, experiment in experiments.items()
        for contender, outcomes in experiment.outcomes.items()
        if (why := experiment.failures(contender))
    ]
    return "\n".join([*lines, *([""] if failed else []), *failed])


def _format_median(numbers: list[float]) -> str:
    return format_number(statistics.median(numbers))


def format_number(value: float) -> str:
    """Format a number with three significant digits, whole numbers in full."""
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
