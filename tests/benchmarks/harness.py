"""The harness of the benchmarks: the commands that are compared, one job watched to its end, and the table of results.

The benchmark process is the subreaper of what it runs, so a process that a launcher has left behind comes to it, and
the CPU time of its children is that of the whole job. Contenders take turns in each round, so a ratio compares
neighbours.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

PROGRAMS = Path(__file__).parent / "programs"
OURS, TORCHRUN, SPAWN, IMPORT, PLAIN = "ddplaunch", "torchrun", "mp.spawn", "import torch", "plain python"
"""Names of contenders."""

TIMEOUT_S = 120.0
"""After which a job counts as hung."""

LEFTOVERS_TIMEOUT_S = 20.0
"""How long what is below us may outlive the launcher before it counts as left behind."""

_POLL_S = 0.002
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)

Values = dict[str, float]
Turn = Callable[[], Values]
"""Runs one job of one contender, and returns numbers by name."""

Launcher = Callable[[int, str], list[str]]
"""Takes a number of ranks and a program's name in PROGRAMS; returns the command line."""


class Failed(Exception):
    """A contender failed to do what was to be measured."""


# --------------------------------------------------------------------------------------------------------- contenders


def _installed(name: str, module: str) -> list[str]:
    """The command beside this interpreter, or its module where it was installed without."""
    found = shutil.which(name, path=os.path.dirname(sys.executable))
    return [found] if found else [sys.executable, "-m", module]


def ddplaunch(*options: str) -> Launcher:
    command = [*_installed("ddplaunch", "ddplaunch"), "run", *options]
    return lambda ranks, program: [*command, "--nproc", str(ranks), str(PROGRAMS / program)]


def torchrun(*options: str) -> Launcher:
    command = [*_installed("torchrun", "torch.distributed.run"), "--standalone", *options]
    return lambda ranks, program: [*command, f"--nproc-per-node={ranks}", str(PROGRAMS / program)]


def spawn(ranks: int, program: str) -> list[str]:
    """torch.multiprocessing.spawn."""
    return [sys.executable, str(PROGRAMS / "start_by_spawn.py"), str(ranks), str(PROGRAMS / program)]


def plain(program: str) -> list[str]:
    """One process of plain python."""
    return [sys.executable, str(PROGRAMS / program)]


LAUNCHERS = {OURS: ddplaunch(), TORCHRUN: torchrun(), SPAWN: spawn}
"""Each with its ordinary options."""

_OTHERS = ("BENCH_", "TORCHELASTIC_", "DDPLAUNCH_", "OMP_", "MKL_", "OPENBLAS_", "GLOO_", "NCCL_", "SLURM_", "PMI")
_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"}
_NAMES |= {"MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED", "PYTHONPROFILEIMPORTTIME", "PYTHONVERBOSE"}
_NAMES |= {"HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"}  # a job's home is empty
_NAMES |= {"PYTHONDONTWRITEBYTECODE"}  # what pip installs is compiled; a source tree is after the warm-up


def environment() -> dict[str, str]:
    """Our own variables without those that would change what any contender does."""
    return {name: value for name, value in os.environ.items() if name not in _NAMES and not name.startswith(_OTHERS)}


# ---------------------------------------------------------------------------------------------------------- processes


def adopt_orphans(wanted: bool = True) -> None:
    """Become the parent of every descendant that loses its own, or no longer."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Every process below this one, or below ``pid``, without zombies."""
    found = []
    for each in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def kill_descendants() -> None:
    """SIGKILL until nothing is left below this process, for ten seconds at most, and collect what has ended."""
    deadline = time.monotonic() + 10
    while (left := descendants()) and time.monotonic() < deadline:
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        time.sleep(0.005)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def cpu_ms(pid: int) -> float:
    """Milliseconds that the threads of a process have run; from the scheduler's nanoseconds, not from ticks."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e6


# ---------------------------------------------------------------------------------------------------------------- job


@dataclass(frozen=True)
class Mark:
    """A line from programs/marks.py: a rank says where it is."""

    what: str
    rank: int
    attempt: int
    pid: int
    time: float


class Job:
    """A command that runs; a context manager that leaves no process behind.

    Attributes:
        began: when it was started; ended: when the launcher's own process had exited; gone: when its last descendant
            had (all as time.monotonic).
    """

    def __init__(
        self,
        command: list[str],
        variables: Mapping[str, str] | None = None,
        *,
        hold: bool = False,
        output: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start ``command`` with ``variables`` on top of a clean environment and its stdout in the file ``output``.

        Its home is empty. With a ``folder``, which lasts, it is one of several alike, and what it keeps for the next
        one may stay.
        """
        self.marks: list[Mark] = []
        self.ended: float | None = None
        self.gone: float | None = None
        self._code = 0
        self._partial = b""
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        keeps, folder = folder is not None, folder or Path(self._folder.name)
        self._stderr = folder / "stderr"
        report, release = folder / "report", folder / "release"
        for pipe in (report, release):
            pipe.unlink(missing_ok=True)
            os.mkfifo(pipe)
        self._report = os.open(report, os.O_RDWR | os.O_NONBLOCK)  # as a writer too, so that it never ends
        self._open = [self._report, os.open(release, os.O_RDWR)]
        (folder / "home").mkdir(exist_ok=True)
        extra = {
            "TMPDIR": str(folder),
            "HOME": str(folder / "home"),
            "BENCH_REPORT": str(report),
            "BENCH_RELEASE": str(release),
            "BENCH_HOLD": "1" if hold else "",
        }
        adopt_orphans(not keeps)
        self._cpu_before = _cpu_of_children()
        with open(self._stderr, "wb") as stderr, open(output or os.devnull, "wb") as stdout:
            self.began = time.monotonic()
            self._process = subprocess.Popen(
                command,
                env={**environment(), **extra, **(variables or {})},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )
        self.pid = self._process.pid

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        kill_descendants()
        self._process.returncode = self._code  # collected by us, not by subprocess
        for fd in self._open:
            os.close(fd)
        self._folder.cleanup()

    @property
    def lasted(self) -> float:
        """Seconds from its start to the end of the launcher's own process."""
        assert self.ended is not None
        return self.ended - self.began

    @property
    def cpu(self) -> float:
        """Seconds of user and system time of every process of it that has ended."""
        return _cpu_of_children() - self._cpu_before

    def times(self, what: str, attempt: int = 0) -> list[float]:
        return [mark.time for mark in self.marks if mark.what == what and mark.attempt == attempt]

    def pids(self, what: str) -> dict[int, int]:
        """The processes that have marked ``what`` in the first attempt, by rank."""
        return {mark.rank: mark.pid for mark in self.marks if mark.what == what and mark.attempt == 0}

    def until(self, what: str, ranks: int, attempt: int = 0) -> float:
        """Wait for the last of ``ranks`` marks ``what``; return the time that it bears.

        Raises:
            Failed: the launcher ended before, or nothing came in time.
        """
        self._wait(lambda: len(self.times(what, attempt)) >= ranks or self.ended is not None)
        found = self.times(what, attempt)
        if len(found) < ranks:
            came = f"only {len(found)} of {ranks} ranks came to {what!r}"
            raise Failed(f"{came} when the launcher ended: {self._last_errors()}")
        return max(found)

    def release(self) -> None:
        """Release the ranks that wait."""
        os.close(self._open.pop())

    def finish(self) -> int:
        """Wait until the launcher and everything below it have gone; return its exit code, -N for signal N.

        Raises:
            Failed: it hung, or left something behind that did not go.
        """
        self._wait(lambda: self.ended is not None)
        try:
            self._wait(lambda: self.gone is not None, LEFTOVERS_TIMEOUT_S)
        except Failed:
            raise Failed(f"left behind: {', '.join(map(str, descendants()))}") from None
        return self._code

    def succeed(self) -> None:
        """Wait for its end, which has to be a good one."""
        if code := self.finish():
            raise Failed(f"exit code {code}: {self._last_errors()}")

    def _last_errors(self) -> str:
        """Return the last lines of stderr as one line."""
        lines = [line.strip() for line in self._stderr.read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-3:])[-300:] or "(nothing on stderr)"

    def _wait(self, done: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise Failed(f"nothing happened for {timeout_s:.0f} s: {self._last_errors()}")
            if select.select([self._report], [], [], _POLL_S)[0]:
                self._read_marks()
            self._reap()

    def _read_marks(self) -> None:
        try:
            *lines, self._partial = (self._partial + os.read(self._report, 1 << 16)).split(b"\n")
        except BlockingIOError:
            return
        for line in lines:
            what, rank, attempt, pid, moment = line.decode().split(" ")
            self.marks.append(Mark(what, int(rank), int(attempt), int(pid), float(moment)))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.gone = self.gone or time.monotonic()
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.ended, self._code = time.monotonic(), os.waitstatus_to_exitcode(status)
                self._read_marks()


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# -------------------------------------------------------------------------------------------------------------- turns


def compare(turn: Callable[[Launcher], Values], *names: str, **launchers: Launcher) -> dict[str, Turn]:
    """The same turn by these launchers, which have their ordinary options where they are only named."""
    return {name: partial(turn, launchers.get(name) or LAUNCHERS[name]) for name in (*names, *launchers)}


def run(command: list[str], variables: Mapping[str, str] | None = None, output: Path | None = None) -> Values:
    """The whole command."""
    with Job(command, variables, output=output) as job:
        job.succeed()
        return {"wall": job.lasted, "cpu": job.cpu}


def held(command: list[str], ranks: int) -> Values:
    """The memory of a job while all its ranks hold: MB, a page that N processes share counted 1/N in each (PSS)."""
    with Job(command, hold=True) as job:
        job.until("held", ranks)
        memory = sum(each.memory_full_info().pss for each in descendants()) / 1e6
        job.release()
        job.succeed()
        return {"memory": memory}


# ------------------------------------------------------------------------------------------------------------ results


@dataclass(frozen=True)
class Size:
    """The sizes of the experiments, and how many rounds there are."""

    many: int = 8
    few: int = 4
    idle_s: float = 20.0
    lines: int = 200_000
    rounds: int = 5
    warm_up: bool = True


QUICK = Size(many=2, few=2, idle_s=1.0, lines=20_000, rounds=1, warm_up=False)


@dataclass(frozen=True)
class Row:
    """One line of the table: which of a turn's numbers is shown, and the contender that ours is divided by."""

    what: str
    value: str
    unit: str
    over: str | None = None


@dataclass
class Experiment:
    """What is measured, and the outcome of each turn by contender: its numbers, or why it failed.

    Attributes:
        rounds: the most rounds, for what is slow and steady.
    """

    turns: dict[str, Turn]
    rows: tuple[Row, ...]
    rounds: int = 1000
    outcomes: dict[str, list[Values | str]] = field(default_factory=dict)

    def measure(self, name: str, size: Size) -> None:
        for number in range(-size.warm_up, min(size.rounds, self.rounds)):
            for contender, turn in self.turns.items():
                began = time.monotonic()
                outcome: Values | str
                try:
                    outcome = turn()
                except Failed as failed:
                    outcome = str(failed)
                if number >= 0:
                    self.outcomes.setdefault(contender, []).append(outcome)
                shown = outcome if isinstance(outcome, str) else ", ".join(f"{k} {v:.4g}" for k, v in outcome.items())
                label = f"round {number + 1}" if number >= 0 else "warm-up"
                took = time.monotonic() - began
                print(f"{name}, {label}, {contender} ({took:.1f} s): {shown}", file=sys.stderr)

    def failures(self, contender: str) -> list[str]:
        return [outcome for outcome in self.outcomes.get(contender, []) if isinstance(outcome, str)]

    def line(self, row: Row) -> str:
        """The row in Markdown: medians, and the median, lowest and highest ratio of a round."""
        numbers = {
            contender: [None if isinstance(outcome, str) else outcome.get(row.value) for outcome in outcomes]
            for contender, outcomes in self.outcomes.items()
        }
        cells = {contender: _cell(each, row.unit) for contender, each in numbers.items()}
        others = "; ".join(f"{contender} {cell}" for contender, cell in cells.items() if cell and contender != OURS)
        pairs = zip(numbers[OURS], numbers.get(row.over or "", []), strict=False)
        ratios = [one / two for one, two in pairs if one is not None and two]
        ratio = f"{format_number(statistics.median(ratios))} × {row.over}" if ratios else "–"
        if len(ratios) > 1:
            ratio += f" ({format_number(min(ratios))} to {format_number(max(ratios))})"
        return f"| {row.what} | {cells[OURS] or 'failed'} | {others or '–'} | {ratio} |"


def table(experiments: dict[str, Experiment]) -> str:
    """All rows, and below them why turns failed."""
    lines = ["| what | ddplaunch | others | ratio (lowest to highest) |", "|---|---|---|---|"]
    lines += [experiment.line(row) for experiment in experiments.values() for row in experiment.rows]
    failed = [
        f"- {name}: {contender} failed {len(why)} of {len(experiment.outcomes[contender])} times: {why[0]}"
        for name, experiment in experiments.items()
        for contender in experiment.turns
        if (why := experiment.failures(contender))
    ]
    return "\n".join([*lines, *([""] if failed else []), *failed])


def _cell(numbers: list[float | None], unit: str) -> str:
    known = [each for each in numbers if each is not None]
    return f"{format_number(statistics.median(known))} {unit}".rstrip() if known else ""


def format_number(value: float) -> str:
    """Format a number with three significant digits, whole numbers in full."""
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
