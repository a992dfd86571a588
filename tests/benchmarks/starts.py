"""Measures the start of programs with many imports: the first, later ones, and from a warm zygote.

Each job begins with an empty home, so that no figure is owed to what another run has left.
"""

import atexit
import re
import shutil
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from tests.benchmarks import contenders
from tests.benchmarks.bars import draw
from tests.benchmarks.contenders import OURS, Launcher
from tests.benchmarks.experiments import IMPORT, PASS, TORCHRUN, Experiment, Row, Size, Turn, Values, held, run
from tests.benchmarks.measure import Failed, Job
from tests.benchmarks.report import Results

PLAIN, TORCH_ALONE = "plain python, one process", "ddplaunch --preload torch"
TRAINER, LIGHTNING = "hf_trainer.py", "lightning_fit.py"
PAIR = 2
"""Ranks of the jobs whose results are compared."""


def start_experiments(size: Size) -> list[Experiment]:
    """Those that need frameworks are left out where these are not installed."""
    found = [_warm(size), _one_rank()]
    if find_spec("lightning"):
        found += [_lightning(size), _sequence(size)]
    if find_spec("transformers"):
        found += [_trainer(size), _trainer_memory(size), _trainer_warm(size)]
        if shutil.which("strace"):
            found.append(_opened(size))
        if find_spec("accelerate"):
            found.append(_compared("accelerate", "accelerate", "accelerate_loop.py"))
        if find_spec("trl"):
            found.append(_compared("trl", "trl, peft and datasets", "trl_sft.py"))
    return found


def picture(all_results: list[Results]) -> str:
    """Run the complete command of Hugging Face's Trainer with each contender."""
    found = {each.experiment.name: each for each in all_results}
    walls = {"ddplaunch --warm, from the second run on": found["warm-trainer"].numbers(OURS, "wall")}
    for contender in found["start-trainer"].turns:
        walls[contender] = found["start-trainer"].numbers(contender, "wall")
    return draw({name: median(filter(None, values)) for name, values in walls.items()}, "s", OURS)


@cache
def _folder(name: str) -> Path:
    """A folder that lasts as long as the benchmark."""
    path = tempfile.mkdtemp(prefix=f"benchmark-{name}-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def _plain(program: str) -> list[str]:
    return [*contenders.python("")[:1], str(contenders.PROGRAMS / program)]


# ------------------------------------------------------------------------------------------------- nothing typed


def _lightning(size: Size) -> Experiment:
    what = f"{size.few} ranks, Lightning's Trainer, nothing typed"
    return Experiment(
        "start-lightning",
        {
            OURS: lambda: run(contenders.ddplaunch()(size.few, LIGHTNING)),
            TORCHRUN: lambda: run(contenders.torchrun()(size.few, LIGHTNING)),
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
            OURS: lambda: run(contenders.ddplaunch()(size.many, TRAINER)),
            TORCHRUN: lambda: run(contenders.torchrun()(size.many, TRAINER)),
            TORCH_ALONE: lambda: run(contenders.ddplaunch("--preload", "torch")(size.many, TRAINER)),
            PLAIN: lambda: run(_plain(TRAINER)),
        },
        (
            Row(f"{what}: CPU", "cpu", "CPU-s", TORCHRUN, 0.13),
            Row(f"{what}: command to exit", "wall", "s", PLAIN, 1.1),
        ),
        rounds=3,
    )


def _sequence(size: Size) -> Experiment:
    """Runs one after the other, each with what those before have left in its home."""

    def turn() -> Values:
        command = contenders.ddplaunch()(size.few, LIGHTNING)
        with tempfile.TemporaryDirectory(prefix="benchmark-sequence-") as home:
            runs = [run(command, {"HOME": home}) for _ in range(size.sequence)]
        found: Values = {}
        for what in ("cpu", "wall"):
            numbers = [run[what] for run in runs]
            found[f"{what}_first"] = numbers[0] / median(numbers[1:])
        return found

    what = f"{size.few} ranks, Lightning's Trainer, {size.sequence} runs from an empty home on"
    return Experiment(
        "start-sequence",
        {OURS: turn},
        (
            Row(f"{what}: CPU of the first over the others' median", "cpu_first", ""),
            Row(f"{what}: command to exit of the first over the others' median", "wall_first", ""),
        ),
        rounds=1,
    )


def _compared(name: str, packages: str, program: str) -> Experiment:
    """A run fails whose ranks report anything else than those of the first run under torchrun."""

    def reported(command: list[str]) -> tuple[Values, list[bytes]]:
        with tempfile.TemporaryDirectory(prefix="benchmark-reports-") as folder:
            path = Path(folder) / "stdout"
            values = run(command, {"OMP_NUM_THREADS": "1"}, path)  # sums depend on the number of threads
            reports = sorted(re.findall(rb'\{"rank".*?\}', path.read_bytes()))
        if len(reports) != PAIR:
            raise Failed(f"{len(reports)} of {PAIR} ranks reported")
        return values, reports

    @cache
    def expected() -> list[bytes]:
        return reported(contenders.torchrun()(PAIR, program))[1]

    def same(launcher: Launcher) -> Turn:
        def turn() -> Values:
            values, reports = reported(launcher(PAIR, program))
            for ours, theirs in zip(reports, expected(), strict=True):
                if ours != theirs:
                    raise Failed(f"reported {ours.decode()}, under torchrun {theirs.decode()}")
            return values

        return turn

    what = f"{PAIR} ranks, {packages}, results as under torchrun to the last digit"
    return Experiment(
        f"start-{name}",
        {OURS: same(contenders.ddplaunch()), TORCHRUN: same(contenders.torchrun())},
        (
            Row(f"{what}: CPU", "cpu", "CPU-s", TORCHRUN, 0.45),
            Row(f"{what}: command to exit", "wall", "s", TORCHRUN),
        ),
        rounds=3,
    )


def _trainer_memory(size: Size) -> Experiment:
    return Experiment(
        "start-trainer-memory",
        {
            OURS: lambda: held(contenders.ddplaunch()(size.many, TRAINER), size.many),
            TORCHRUN: lambda: held(contenders.torchrun()(size.many, TRAINER), size.many),
        },
        (Row(f"{size.many} idle ranks of the same: PSS of the whole job", "idle", "MB", TORCHRUN, 0.35),),
        rounds=2,
    )


def _opened(size: Size) -> Experiment:
    """Files opened, as strace counts them, without those that do not exist."""

    def counted(command: list[str]) -> Values:
        log = _folder("strace") / "opens"
        with Job(["strace", "-f", "-qq", "-e", "trace=openat,open", "-o", str(log), *command]) as job:
            job.succeed()
        with open(log, "rb") as file:
            return {"opened": sum(1 for line in file if re.search(rb"\) += \d+$|resumed>.*\) += \d+$", line))}

    return Experiment(
        "start-trainer-files",
        {
            OURS: lambda: counted(contenders.ddplaunch()(size.many, TRAINER)),
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
            OURS: lambda: run(contenders.ddplaunch()(1, "collective.py")),
            PLAIN: lambda: run(_plain("collective.py"), alone),
        },
        (Row("one rank, one all_reduce: the whole command", "wall", "s", PLAIN, 0.75),),
    )


# ----------------------------------------------------------------------------------------------------- kept warm


def _warm(size: Size) -> Experiment:
    def turn() -> Values:
        command = contenders.ddplaunch("--warm")(size.many, "collective.py")
        with Job(command, folder=_folder("warm")) as job:
            job.succeed()
            return {"first": min(job.times("user")) - job.began, "wall": job.lasted}

    what = f"{size.many} ranks and one all_reduce, from a zygote kept warm"
    return Experiment(
        "warm",
        {
            OURS: turn,
            IMPORT: lambda: run(contenders.python("import torch")),
            PASS: lambda: run(contenders.python("pass")),
        },
        (
            Row(f"{what}: the whole command", "wall", "s", IMPORT, 0.2),
            Row(f"{what}: command to the first rank's first line", "first", "s", PASS, 5.0, "wall"),
        ),
    )


def _trainer_warm(size: Size) -> Experiment:
    def stepped(command: list[str], folder: Path | None = None) -> Values:
        with Job(command, folder=folder) as job:
            job.until("step", size.many)
            job.succeed()
            return {"step": min(job.times("step")) - job.began, "wall": job.lasted}

    return Experiment(
        "warm-trainer",
        {
            OURS: lambda: stepped(contenders.ddplaunch("--warm")(size.many, TRAINER), _folder("warm")),
            TORCHRUN: lambda: stepped(contenders.torchrun()(size.many, TRAINER)),
        },
        (
            Row(
                f"{size.many} ranks, Hugging Face's Trainer, kept warm: command to the first step",
                "step", "s", TORCHRUN, 0.1,
            ),
        ),
        rounds=3,
    )  # fmt: skip
