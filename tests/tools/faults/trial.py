"""Runs one row of the fault matrix under one launcher, and lists what is left afterwards."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.conftest import BackgroundCommand, clean_environment
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import LIGHT
from tests.tools.faults.rows import END_TIMEOUT_S, HEARTBEAT, LauncherOutcome, Result, Row
from tests.tools.virtual_hosts.host import Host
from tests.tools.virtual_hosts.network import Network

PORT = 29500
PROGRAM = Path(__file__).with_name("program.py")


class Run(BackgroundCommand):
    """One launcher on a host, with its output in files, and a folder for its temporary files."""

    def __init__(self, host: Host, command: Sequence[str], folder: Path, name: str) -> None:
        self.host = host
        self.out, self.err, self.tmp = (folder / f"{name}.{kind}" for kind in ("out", "err", "tmp"))
        self.tmp.mkdir()
        environment = clean_environment(
            {"TMPDIR": str(self.tmp), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        )
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = host.start(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.fault_at: float | None = None
        self.reported_at: float | None = None

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def list_started_ranks(self) -> list[tuple[int, int, int]]:
        """List rank, attempt and pid on its host of each rank that has reported its start."""
        found = re.findall(r"under way: rank (\d+), attempt (\d+), pid (\d+)", self.stdout())
        return [(int(rank), int(attempt), int(pid)) for rank, attempt, pid in found]

    def count_steps(self) -> int:
        """Count the steps that rank 0 has printed."""
        return self.stdout().count("step ")

    def find_pid(self, inside: int) -> int:
        """Find the pid in this namespace of the process with the pid ``inside`` on the host."""
        for pid in self.host.processes():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue  # it ended
            if re.search(rf"(?m)^NSpid:.*\t{inside}$", status):
                return pid
        raise ProcessLookupError(f"no pid {inside} on {self.host.name}")


LEFTOVERS_TIMEOUT_S = 1.0
"""Seconds for the kernel and an init to reap what a launcher has killed."""

ALLOWANCE = 4.0
"""Seconds beyond a row's time limit before the row is given up."""


class Stuck(Exception):
    """A condition that a row waits for did not become true."""


class Trial:
    """A job on two hosts, for the actions of a row."""

    def __init__(self, row: Row, restarts: int, launcher: str, network: Network, folder: Path) -> None:
        self.row, self.restarts, self.launcher, self.folder = row, restarts, launcher, folder
        self.hosts = network.hosts
        self.runs: list[Run] = []
        self.timeout_s = END_TIMEOUT_S[launcher]

    # For actions

    def start(
        self, node: int, *, nnodes: int = 2, address: str = "", port: int = PORT, more: Sequence[str] = ()
    ) -> None:
        """Start the launcher of a node, ddplaunch with ``more`` options; this is the fault unless another is marked."""
        nodes = ["--nnodes", str(nnodes), "--node-rank", str(node), "--max-restarts", str(self.restarts)]
        where = ["--master-addr", address or self.hosts[0].address, "--master-port", str(port)]
        if self.launcher == "torchrun":
            command = ["torch.distributed.run", "--nproc-per-node", "2"]
        else:
            light = LIGHT if self.row.mode != "talk" else ()
            command = ["ddplaunch", "run", "--nproc", "2", "--heartbeat-timeout", f"{HEARTBEAT:g}"]
            command += [*self.row.options, *light, *more]
        words = [sys.executable, "-m", *command, *nodes, *where, str(PROGRAM), self.row.mode, str(self.folder)]
        run = Run(self.hosts[node], words, self.folder, f"{len(self.runs)}-{self.hosts[node].name}")
        run.fault_at = time.monotonic()
        self.runs.append(run)

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition, and record which launchers end meanwhile."""
        deadline = time.monotonic() + scaled_timeout(self.timeout_s)
        while not condition():
            self.check_launchers()
            if time.monotonic() > deadline:
                raise Stuck(f"waited for {what}")
            time.sleep(0.005)
        self.check_launchers()

    def check_launchers(self) -> None:
        """Record which launchers have ended."""
        for run in self.runs:
            if run.reported_at is None and run.process.poll() is not None:
                run.reported_at = time.monotonic()

    def mark_fault(self, *numbers: int) -> None:
        """Record the moment of the fault for these launchers, or all."""
        for number in numbers or range(len(self.runs)):
            self.runs[number].fault_at = time.monotonic()

    def wait_for_ranks(self, times: int = 1) -> None:
        """Wait until each of the four ranks has reported its start ``times`` times."""

        def have_ranks_started() -> bool:
            if ended := [run for run in self.runs[:2] if run.process.poll() is not None]:
                raise Stuck(f"ended with {ended[0].code} before its ranks were under way: {ended[0].stderr()[-300:]}")
            return sum(len(run.list_started_ranks()) for run in self.runs[:2]) >= 4 * times

        self.wait_until(have_ranks_started, "ranks under way")

    def wait_for_output(self, number: int, text: str) -> None:
        """Wait until a launcher has printed something that matches."""
        self.wait_until(lambda: re.search(text, self.runs[number].stderr()), f"{text!r} from launcher {number}")

    def wait_for_progress(self, times: int = 2) -> None:
        """Wait until the job has made progress from now on."""
        before = self.runs[0].count_steps()
        self.wait_until(lambda: self.runs[0].count_steps() >= before + times, "progress of the job")

    def wait_seconds(self, seconds: float) -> None:
        """Wait for some time, which all launchers must survive."""
        until = time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() > until or any(run.reported_at for run in self.runs), "time")
        if ended := [str(i) for i, run in enumerate(self.runs) if run.reported_at]:
            raise Stuck(f"launcher {', '.join(ended)} did not live through it")

    def wait_for_end(self, number: int) -> None:
        """Wait for the end of a launcher."""
        self.wait_until(lambda: self.runs[number].reported_at, f"the end of launcher {number}")

    def signal_launcher(self, node: int, number: int) -> None:
        """Send a signal to the launcher of a node."""
        self.runs[node].signal(number)

    def signal_rank(self, number: int) -> None:
        """Send a signal to rank 3."""
        os.kill(self.rank_pid(3), number)

    def order_rank(self, what: str, rank: int = 3) -> None:
        """Order a rank to exit, raise or leave the process group."""
        path = self.folder / f"rank{rank}"
        path.with_suffix(".new").write_text(what)
        path.with_suffix(".new").rename(path)

    def rank_pid(self, rank: int) -> int:
        """The pid of a rank's process in this namespace."""
        run = self.runs[rank // 2]
        return run.find_pid([pid for number, _, pid in run.list_started_ranks() if number == rank][-1])

    def end_job(self) -> None:
        """Let the job end with exit code 0."""
        (self.folder / "enough").touch()

    # For the test

    def run(self) -> Result:
        """Run the row to its end; everything on the hosts is still there when this returns."""
        result = Result(self.row, self.launcher, self.restarts)
        try:
            self.row.when(self)
            if self.row.fault is not None:
                self.mark_fault()
                self.row.fault(self)
            self._wait_for_outcome()
        except Stuck as stuck:
            result.stuck = str(stuck)
        self.check_launchers()
        result.outcomes = [self._describe_outcome(run) for run in self.runs]
        return result

    def _wait_for_outcome(self) -> None:
        """Wait for the outcome of the fault, and for the end of all launchers."""
        expected = list(zip(self.runs, self.row.expect, strict=True))
        if self.row.restarts and self.restarts:
            self._wait_for_restart()
        elif self.row.survives:
            self.wait_for_progress()
            self.end_job()
        if self.launcher == "ddplaunch":
            self.timeout_s = max(expect.within for _, expect in expected) + 2 * ALLOWANCE
        self.wait_until(lambda: all(run.reported_at for run in self.runs), "the end of all launchers")

    def _wait_for_restart(self) -> None:
        """Wait for the message about the next attempt, which counts as the report, and until that attempt trains."""

        def is_restart_announced() -> bool:
            for run in self.runs:
                if run.reported_at is None and "restart 1 of 1" in run.stderr():
                    run.reported_at = time.monotonic()
            return all(run.reported_at for run in self.runs)

        if self.launcher == "ddplaunch":
            self.wait_until(is_restart_announced, "the announcement of a restart")
        self.wait_for_ranks(2)
        self.wait_for_progress()
        self.end_job()
        for run in self.runs:
            self.wait_until(lambda run=run: run.process.poll() is not None, "the end of the second attempt")  # type: ignore[misc]

    def _describe_outcome(self, run: Run) -> LauncherOutcome:
        """Describe how a launcher ended; leftovers count on hosts that are up."""
        seconds = None if run.reported_at is None or run.fault_at is None else run.reported_at - run.fault_at
        deadline = time.monotonic() + scaled_timeout(LEFTOVERS_TIMEOUT_S)
        while (pids := self._list_leftovers(run)) and time.monotonic() < deadline:
            time.sleep(0.01)
        ended = run.host.alive and run.process.poll() is not None
        files = [path.name for path in run.tmp.iterdir()] if ended else []
        return LauncherOutcome(run.process.poll(), seconds, run.stderr(), [*map(command_line, pids)], files)

    def _list_leftovers(self, run: Run) -> list[int]:
        """List the processes on its host that neither are launchers nor were started by the row itself."""
        others = {each.process.pid for each in self.runs if each.process.poll() is None}
        started = {process.pid for process in run.host._started}
        return [pid for pid in run.host.processes() if pid not in started or pid in others]


def command_line(pid: int) -> str:
    """The command line of a process, for messages."""
    try:
        return " ".join(map(os.path.basename, psutil.Process(pid).cmdline()))[:60]
    except psutil.NoSuchProcess:
        return "?"
