"""Runs checks one after the other within a budget, on a GPU or in the simulation, and records what came of each."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BackgroundJob, ddplaunch_command, run_command, wait_until
from tests.fake_nvml import FakeNvml

Done = subprocess.CompletedProcess[str]

PASSED, FAILED, NEEDS_GPU, NO_TIME = "passed", "failed", "needs a GPU", "no time left"

DEVICE = 'DEVICE = "{device}"\n'
"""The first line of each program of a check."""


class NeedsGpu(Exception):
    """CUDA begins here, and there is no GPU; the text says what is left to show."""


@dataclass(frozen=True)
class Check:
    """One check: its group and name, its call (1 or 2), and whether it takes less than a second in the simulation."""

    group: str
    name: str
    part: int
    title: str
    run: Callable[["Machine"], str | None]
    is_quick: bool


CHECKS: list[Check] = []


def check(group: str, part: int, name: str = "", *, quick: bool = False) -> Callable[[Any], Any]:
    """Register a function as a check. It raises where something is wrong, and may return what it has measured."""

    def register(function: Callable[["Machine"], str | None]) -> Callable[["Machine"], str | None]:
        title = (function.__doc__ or "").partition("\n")[0].rstrip(".")
        CHECKS.append(Check(group, name or function.__name__, part, title, function, quick))
        return function

    return register


@dataclass
class Result:
    """What came of a check; ``detail`` is what it measured, why it failed, or what is left for a GPU."""

    group: str
    name: str
    title: str
    outcome: str
    seconds: float
    detail: str = ""


@dataclass
class Machine:
    """The machine that is checked, or simulated; one folder for each check."""

    folder: Path
    nvml: FakeNvml  # what simulates GPUs, also for what cannot be had of a real one
    is_simulated: bool
    jobs: list[BackgroundJob] = field(default_factory=list)

    @property
    def device(self) -> str:
        return "cpu" if self.is_simulated else "cuda:0"

    def begin_cuda(self, left: str) -> None:
        """Go on only with a GPU; ``left`` is what is not shown without one."""
        if self.is_simulated:
            raise NeedsGpu(left)

    def variables(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """The variables of a command; without a GPU those of a simulated one."""
        simulated = self.nvml.environ(1) if self.is_simulated else {}
        own = {name: str(self.folder / name.lower()) for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR")}
        (self.folder / "xdg_runtime_dir").mkdir(0o700, exist_ok=True)
        return {**simulated, **own, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(env or {})}

    def program(self, name: str, text: str) -> Path:
        """Write a program; its variable DEVICE is "cuda:0", or "cpu" without a GPU."""
        path = self.folder / name
        path.write_text(DEVICE.format(device=self.device) + textwrap.dedent(text))
        return path

    def run(self, *words: str | Path, env: Mapping[str, str] | None = None, timeout: float = 60) -> Done:
        """Run ``ddplaunch WORDS`` to its end."""
        return run_command(ddplaunch_command(*words), self.folder, self.variables(env), timeout=timeout)

    def succeed(self, *words: str | Path, env: Mapping[str, str] | None = None, timeout: float = 60) -> str:
        """Run a command that must succeed; return its stdout."""
        done = self.run(*words, env=env, timeout=timeout)
        assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
        return done.stdout

    def start(self, *words: str | Path, env: Mapping[str, str] | None = None) -> BackgroundJob:
        """Start ``ddplaunch WORDS`` in the background; it is killed with all it started when the check is over."""
        job = BackgroundJob(self.folder, words, self.variables(env))
        self.jobs.append(job)
        return job

    def list_gpus(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.succeed("devices", "--json"))["gpus"]
        return found

    def gpu_memory(self) -> int:
        """Bytes of the GPU that are in use."""
        return int(self.list_gpus()[0]["memory_used"])

    def gpu_pids(self) -> set[int]:
        return {int(each["pid"]) for each in self.list_gpus()[0]["processes"]}

    def end_jobs(self) -> None:
        for job in self.jobs:
            for pid in (job.process.pid, *job.left()):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                job.process.wait(10)
        self.jobs.clear()


def run_checks(checks: Iterable[Check], nvml: FakeNvml, budget_s: float, *, is_simulated: bool) -> Iterator[Result]:
    """Run checks one after the other; what does not begin within the budget is left out."""
    deadline = time.monotonic() + budget_s
    for each in checks:
        began = time.monotonic()
        if began >= deadline:
            yield Result(each.group, each.name, each.title, NO_TIME, 0.0)
            continue
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            machine = Machine(Path(folder), nvml, is_simulated)
            outcome, detail = PASSED, ""
            try:
                detail = each.run(machine) or ""
            except NeedsGpu as left:
                outcome, detail = NEEDS_GPU, str(left)
            except (Exception, pytest.fail.Exception) as error:
                outcome, detail = FAILED, f"{type(error).__name__}: {error}".strip()
            finally:
                machine.end_jobs()
        yield Result(each.group, each.name, each.title, outcome, round(time.monotonic() - began, 1), detail)


@contextmanager
def elapsed() -> Iterator[list[float]]:
    """Measure: the list gets the seconds at the end."""
    began, found = time.monotonic(), list[float]()
    yield found
    found.append(time.monotonic() - began)


def wait_for_free_gpu(machine: Machine, before: int, timeout: float = 30) -> float:
    """Wait until no process has the GPU and its memory is as ``before``; return the seconds."""
    with elapsed() as took:
        wait_until(lambda: machine.gpu_memory() - before < 64 << 20, "free memory of the GPU", timeout)
    return took[0]


def describe_machine(*, is_simulated: bool) -> Mapping[str, object]:
    """Card, driver, torch and CPUs of this machine, read in a process of its own: it initializes CUDA."""
    code = """
import json, os, platform, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
if torch.cuda.is_available():
    found["card"] = torch.cuda.get_device_name(0)
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps({**found, "cpus": os.cpu_count()}))
"""
    found: dict[str, object] = json.loads(run_command([sys.executable, "-c", code]).stdout or "{}")
    gpus = json.loads(run_command(ddplaunch_command("devices", "--json")).stdout)["gpus"]
    return {**found, "driver": gpus[0]["driver"] if gpus else None, "simulated": is_simulated}
