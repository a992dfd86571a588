"""Turns that several experiments share: a whole command, a job up to a mark, a job that holds."""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

from tests.benchmarks.contenders import LAUNCHERS, Launcher
from tests.benchmarks.measure import Job
from tests.benchmarks.runner import Turn, Values


def compare(turn: Callable[[Launcher], Values], *names: str, **launchers: Launcher) -> dict[str, Turn]:
    """The same turn by these launchers, which have their ordinary options where they are only named."""
    return {name: partial(turn, launchers.get(name) or LAUNCHERS[name]) for name in (*names, *launchers)}


def run(command: list[str], variables: Mapping[str, str] | None = None, output: Path | None = None) -> Values:
    """The whole command."""
    with Job(command, variables, output=output) as job:
        job.succeed()
        return {"wall": job.lasted, "cpu": job.cpu}


def run_to(command: list[str], mark: str, ranks: int) -> Values:
    """The whole command, and when the last rank reached a mark."""
    with Job(command) as job:
        reached = job.until(mark, ranks)
        job.succeed()
        return {"reached": reached - job.began, "wall": job.lasted, "cpu": job.cpu}


def held(command: list[str], ranks: int) -> Values:
    """The memory of a job while all its ranks hold."""
    with Job(command, hold=True) as job:
        job.until("held", ranks)
        memory = job.memory()
        job.release()
        job.succeed()
        return {"memory": memory}


@cache
def lasting_folder(name: str) -> Path:
    """A folder that lasts as long as the benchmark, for jobs that keep something for the next one."""
    path = tempfile.mkdtemp(prefix=f"benchmark-{name}-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)
