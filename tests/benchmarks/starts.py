"""How long a program that imports much takes to start: the first time, the next, and from a zygote kept warm.

What a trial has proven is kept in a cache of the benchmark's own, which is filled before the first round, as a user's
is by a run that lasts long enough.
"""

from __future__ import annotations

import atexit
import json
import re
import shutil
import subprocess
import tempfile
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from tests.benchmarks import contenders
from tests.benchmarks.bars import draw
from tests.benchmarks.contenders import OURS
from tests.benchmarks.experiments import IMPORT, PASS, TORCHRUN, Experiment, Row, Size, Values
from tests.benchmarks.measure import Failed, Job
from tests.benchmarks.report import Results

PLAIN, FIRST = "plain python, one process", "ddplaunch, only torch preloaded"
TRAINER = "hf_trainer.py"
LEARNING = 600.0
"""Seconds that a trial may take."""


def start_experiments(size: Size) -> list[Experiment]:
    """Those that need frameworks are left out where these are not installed."""
    found = [_warm(size), _one_rank()]
    if find_spec("lightning"):
        found.append(_lightning(size))
    if find_spec("transformers"):
        found += [_trainer(size), _trainer_memory(size), _trainer_warm(size)]
        if shutil.which("strace"):
            found.append(_opened(size))
    return found


def picture(all_results: list[Results]) -> str:
    """The whole command of Hugging Face's Trainer, as each contender starts it."""
    found = {each.experiment.name: each for each in all_results}
    walls = {"ddplaunch --warm, from the second run on": found["warm-trainer"].numbers(OURS, "wall")}
    names = {OURS: "ddplaunch, once a trial has answered", FIRST: "ddplaunch, the first run"}
    for contender in found["start-trainer"].turns:
        walls[names.get(contender, contender)] = found["start-trainer"].numbers(contender, "wall")
    return draw({name: median(filter(None, values)) for name, values in walls.items()}, "s", OURS)


@cache
def _folder(name: str) -> Path:
    """A folder that lasts as long as the benchmark."""
    path = tempfile.mkdtemp(prefix=f"benchmark-{name}-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def _variables() -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(_folder("cache"))}


@cache
def _learned(ranks: int, program: str) -> None:
    """Run the program until trials have answered what can be imported once, as a user's runs would."""
    asked = contenders.ddplaunch("--dry-run", "--json")(ranks, program)
    environment = {**contenders.environment(), **_variables()}

    def answered() -> bool:
        plan = json.loads(subprocess.check_output(asked, env=environment, cwd=contenders.PROGRAMS))
        if plan["preload"]["verdict"] is None:
            return False
        verdict = Path(plan["preload"]["verdict"])
        late = verdict.with_suffix(".late")
        wanted = set(late.read_text().split()) if late.exists() else set[str]()
        return wanted <= set(json.loads(verdict.read_text())["tried"])

    for _ in range(3):  # what one run has imported by its end is tried during the next
        if answered():
            return
        with Job(contenders.ddplaunch()(ranks, program), _variables(), hold=True) as job:
            job.until("held", ranks)
            over = time.monotonic() + LEARNING
            while not answered():
                if time.monotonic() > over:
                    raise Failed("no verdict on what can be imported once")
                job.watch(1.0)
            job.release()
            job.succeed()


def _ours(ranks: int, program: str, *options: str) -> list[str]:
    _learned(ranks, program)
    return contenders.ddplaunch(*options)(ranks, program)


def _plain(program: str) -> list[str]:
    return [*contenders.python("")[:1], str(contenders.PROGRAMS / program)]


# ------------------------------------------------------------------------------------------------- nothing typed


def _lightning(size: Size) -> Experiment:
    what = f"{size.few} ranks, Lightning's Trainer, nothing typed"
    return Experiment(
        "start-lightning",
        {
            OURS: lambda: _run(_ours(size.few, "lightning_fit.py"), _variables()),
            TORCHRUN: lambda: _run(contenders.torchrun()(size.few, "lightning_fit.py")),
        },
        (
            Row(f"{what}: CPU", "cpu", "CPU-s", TORCHRUN, 0.25),
            Row(f"{what}: command to exit", "wall", "s", TORCHRUN),
        ),
        rounds=3,
    )


def _trainer(size: Size) -> Experiment:
    what = f"{size.many} ranks, Hugging Face's Trainer, 2 steps, nothing typed"
    return Experiment(
        "start-trainer",
        {
            OURS: lambda: _run(_ours(size.many, TRAINER), _variables()),
            TORCHRUN: lambda: _run(contenders.torchrun()(size.many, TRAINER)),
            FIRST: lambda: _run(contenders.ddplaunch("--preload", "torch")(size.many, TRAINER)),
            PLAIN: lambda: _run(_plain(TRAINER)),
        },
        (
            Row(f"{what}: CPU", "cpu", "CPU-s", TORCHRUN, 0.13),
            Row(f"{what}: command to exit", "wall", "s", PLAIN, 1.1),
        ),
        rounds=3,
    )


def _trainer_memory(size: Size) -> Experiment:
    def held(command: list[str], variables: dict[str, str]) -> Values:
        with Job(command, variables, hold=True) as job:
            job.until("held", size.many)
            idle = job.memory()
            job.release()
            job.succeed()
            return {"idle": idle}

    return Experiment(
        "start-trainer-memory",
        {
            OURS: lambda: held(_ours(size.many, TRAINER), _variables()),
            TORCHRUN: lambda: held(contenders.torchrun()(size.many, TRAINER), {}),
        },
        (Row(f"{size.many} idle ranks of the same: PSS of the whole job", "idle", "MB", TORCHRUN, 0.35),),
        rounds=2,
    )


def _opened(size: Size) -> Experiment:
    """Files opened, as strace counts them; what is not there is not counted."""

    def counted(command: list[str]) -> Values:
        log = _folder("strace") / "opens"
        with Job(["strace", "-f", "-qq", "-e", "trace=openat,open", "-o", str(log), *command], _variables()) as job:
            job.succeed()
        with open(log, "rb") as file:
            return {"opened": sum(1 for line in file if re.search(rb"\) += \d+$|resumed>.*\) += \d+$", line))}

    return Experiment(
        "start-trainer-files",
        {
            OURS: lambda: counted(_ours(size.many, TRAINER)),
            PLAIN: lambda: counted(_plain(TRAINER)),
        },
        (Row(f"files opened by {size.many} ranks of the same, and by one process", "opened", "", PLAIN, 1.3),),
        rounds=1,
    )


def _one_rank() -> Experiment:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return Experiment(
        "start-one",
        {
            OURS: lambda: _run(contenders.ddplaunch()(1, "collective.py")),
            PLAIN: lambda: _run(_plain("collective.py"), alone),
        },
        (Row("one rank, one all_reduce: the whole command", "wall", "s", PLAIN, 0.75),),
    )


# ----------------------------------------------------------------------------------------------------- kept warm


def _warm(size: Size) -> Experiment:
    def turn() -> Values:
        command = contenders.ddplaunch("--warm")(size.many, "collective.py")
        with Job(command, _variables(), folder=_folder("warm")) as job:
            job.succeed()
            assert job.ended is not None
            return {"first": min(job.times("user")) - job.began, "wall": job.ended - job.began}

    what = f"{size.many} ranks and one all_reduce, from a zygote kept warm"
    return Experiment(
        "warm",
        {
            OURS: turn,
            IMPORT: lambda: _run(contenders.python("import torch")),
            PASS: lambda: _run(contenders.python("pass")),
        },
        (
            Row(f"{what}: the whole command", "wall", "s", IMPORT, 0.2),
            Row(f"{what}: command to the first rank's first line", "first", "s", PASS, 5.0, "wall"),
        ),
    )


def _trainer_warm(size: Size) -> Experiment:
    def stepped(command: list[str], folder: Path | None, *variables: dict[str, str]) -> Values:
        with Job(command, *variables, folder=folder) as job:
            job.until("step", size.many)
            job.succeed()
            assert job.ended is not None
            return {"step": min(job.times("step")) - job.began, "wall": job.ended - job.began}

    return Experiment(
        "warm-trainer",
        {
            OURS: lambda: stepped(_ours(size.many, TRAINER, "--warm"), _folder("warm"), _variables()),
            TORCHRUN: lambda: stepped(contenders.torchrun()(size.many, TRAINER), None),
        },
        (
            Row(
                f"{size.many} ranks, Hugging Face's Trainer, kept warm: command to the first step",
                "step", "s", TORCHRUN, 0.1,
            ),
        ),
        rounds=3,
    )  # fmt: skip


def _run(command: list[str], variables: dict[str, str] | None = None) -> Values:
    with Job(command, variables) as job:
        job.succeed()
        assert job.ended is not None
        return {"wall": job.ended - job.began, "cpu": job.cpu}
