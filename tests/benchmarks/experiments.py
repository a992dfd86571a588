"""The experiments of the benchmark: their contenders, and the rows of the report that they fill.

A contender's turn is a function that runs one job and returns numbers by name; all turns of an experiment follow each
other within a round, so that a ratio compares neighbours in time.
"""

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks import contenders, kernel
from tests.benchmarks.contenders import OURS, Launcher
from tests.benchmarks.measure import Failed, Job

Values = dict[str, float]
Turn = Callable[[], Values]

TORCHRUN, SPAWN, LOOP, WITHOUT = "torchrun", "mp.spawn", "loop of python", "--no-inspect --no-history"
IMPORT, PASS = "import torch", "python -c pass"

RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it torchrun's restarts meet the keys of the previous attempt and fail (torch 2.13, gloo)."""


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        value: which of a turn's numbers; unit: of what is shown.
        over: the contender that ours is divided by, None where the number itself counts; over_value: its number, where
            that is another one than ours.
        limit: what the ratio, or the number, may be at most; None for mere information.
    """

    what: str
    value: str
    unit: str
    over: str | None = None
    limit: float | None = None
    over_value: str | None = None


@dataclass(frozen=True)
class Experiment:
    name: str
    turns: dict[str, Turn]
    rows: tuple[Row, ...]
    rounds: int = 1000  # at most, for what is slow and steady


@dataclass(frozen=True)
class Size:
    """The sizes of the experiments; the targets hold for the defaults.

    Attributes:
        all_contenders: whether those that have no target take part beyond the start-up.
        sequence: runs one after the other, each with what the others have left.
    """

    all_contenders: bool = True
    many: int = 8
    few: int = 4
    idle: float = 20.0
    lines: int = 200_000
    nodes: int = 1000
    sequence: int = 10
    tests: int = 16


QUICK = Size(all_contenders=False, many=2, few=2, idle=1.0, lines=20_000, sequence=3, tests=2)


def all_experiments(size: Size) -> list[Experiment]:
    return [
        _startup(size),
        _training(size),
        _memory(size),
        _kill(size, "asleep"),
        _kill(size, "in a collective"),
        _restart(size),
        _idle(size),
        _output(size),
        _dry_run(size),
        _bare(size),
        _inspection(size),
        _stacks(size),
        _preload(size, "DDP and one AdamW step", "ddp_step.py", "step"),
        _preload(size, "one all_reduce", "collective.py", "collective"),
        _tests_in_ranks(size),
    ]


# -------------------------------------------------------------------------------------------------------- start-up


def _startup(size: Size) -> Experiment:
    def started(launcher: Launcher) -> Turn:
        return lambda: _run_to(launcher(size.many, "collective.py"), "collective", size.many)

    ranks = f"{size.many} ranks"
    return Experiment(
        "startup",
        {
            OURS: started(contenders.ddplaunch()),
            TORCHRUN: started(contenders.torchrun()),
            SPAWN: started(contenders.spawn),
            LOOP: started(contenders.loop),
            IMPORT: lambda: run(contenders.python("import torch")),
        },
        (
            Row(f"{ranks}: command to last rank past its first all_reduce", "reached", "s", IMPORT, 1.3, "wall"),
            Row(f"{ranks}: the same, over torchrun", "reached", "s", TORCHRUN),
            Row(f"{ranks}: the whole command", "wall", "s", IMPORT, 1.4),
            Row(f"{ranks}: CPU of the whole job", "cpu", "CPU-s", IMPORT, 1.3),
        ),
    )


def _training(size: Size) -> Experiment:
    def trained(launcher: Launcher) -> Turn:
        return lambda: _run_to(launcher(size.few, "ddp_step.py"), "step", size.few)

    ranks = f"{size.few} ranks, DDP and one AdamW step"
    return Experiment(
        "training",
        {OURS: trained(contenders.ddplaunch()), TORCHRUN: trained(contenders.torchrun())},
        (
            Row(f"{ranks}: command to exit", "wall", "s", TORCHRUN, 0.3),
            Row(f"{ranks}: CPU", "cpu", "CPU-s", TORCHRUN, 0.25),
        ),
    )


def run(command: list[str], variables: dict[str, str] | None = None, output: Path | None = None) -> Values:
    """The whole command."""
    with Job(command, variables, output=output) as job:
        job.succeed()
        return {"wall": job.lasted, "cpu": job.cpu}


def _run_to(command: list[str], what: str, ranks: int) -> Values:
    with Job(command) as job:
        reached = job.until(what, ranks)
        job.succeed()
        return {"reached": reached - job.began, "wall": job.lasted, "cpu": job.cpu}


# ---------------------------------------------------------------------------------------------------------- memory


def held(command: list[str], ranks: int) -> Values:
    """What all ranks take while they hold, and at most before."""
    with Job(command, hold=True, sample_memory=True) as job:
        job.until("held", ranks)
        idle = job.memory()
        job.release()
        job.succeed()
        return {"idle": idle, "peak": job.peak}


def _memory(size: Size) -> Experiment:
    def turn(launcher: Launcher) -> Turn:
        return lambda: held(launcher(size.many, "collective.py"), size.many)

    ranks = f"{size.many} ranks"
    return Experiment(
        "memory",
        {
            OURS: turn(contenders.ddplaunch()),
            TORCHRUN: turn(contenders.torchrun()),
            **({SPAWN: turn(contenders.spawn), LOOP: turn(contenders.loop)} if size.all_contenders else {}),
        },
        (
            Row(f"{ranks}, idle after a collective: PSS of the whole job", "idle", "MB", TORCHRUN, 0.35),
            Row(f"{ranks}: peak of it, from start to end", "peak", "MB", TORCHRUN, 0.4),
        ),
        rounds=3,
    )


# -------------------------------------------------------------------------------------------------- death and rebirth


def _kill(size: Size, others: str) -> Experiment:
    """SIGKILL for the last rank; the others sleep, or wait for it inside an all_reduce."""
    victim = size.few - 1
    waiting = {"BENCH_ABSENT": str(victim)} if others != "asleep" else {}

    def killed(launcher: Launcher) -> Turn:
        def turn() -> Values:
            with Job(launcher(size.few, "collective.py"), waiting, hold=True) as job:
                job.until("held", size.few)
                began = time.monotonic()
                os.kill(job.pids("held")[victim], signal.SIGKILL)
                code = job.finish()
                if code == 0:
                    raise Failed("exit code 0 although a rank was killed")
                assert job.ended is not None
                assert job.gone is not None
                return {"gone": (job.gone - began) * 1000, "ended": (job.ended - began) * 1000, "code": code}

        return turn

    return Experiment(
        "kill" if others == "asleep" else "kill-collective",
        {
            OURS: killed(contenders.ddplaunch()),
            TORCHRUN: killed(contenders.torchrun()),
            **({SPAWN: killed(contenders.spawn)} if size.all_contenders else {}),
        },
        (
            Row(
                f"{size.few} ranks, kill -9 of one, the others {others}: until all is gone, launcher included",
                "gone", "ms", TORCHRUN, 0.1,
            ),
            Row("the same: the launcher's exit code", "code", ""),
        ),
    )  # fmt: skip


def _restart(size: Size) -> Experiment:
    victim = size.few - 1

    def restarted(launcher: Launcher, variables: dict[str, str]) -> Turn:
        def turn() -> Values:
            with Job(launcher(size.few, "collective.py"), variables, hold=True) as job:
                job.until("held", size.few)
                began = time.monotonic()
                os.kill(job.pids("held")[victim], signal.SIGKILL)
                collective = job.until("collective", size.few, attempt=1)
                job.release()
                job.succeed()
                return {
                    "user": max(job.times("user", 1)) - began,
                    "torch": max(job.times("torch", 1)) - began,
                    "collective": collective - began,
                }

        return turn

    what = f"restart after a rank's death: until all {size.few} ranks"
    return Experiment(
        "restart",
        {
            OURS: restarted(contenders.ddplaunch("--max-restarts", "1"), {}),
            TORCHRUN: restarted(contenders.torchrun("--max-restarts=1"), RESTARTABLE),
        },
        (
            Row(f"{what} have passed `import torch` again", "torch", "s", TORCHRUN, 0.1),
            Row(f"{what} have passed an all_reduce again", "collective", "s", TORCHRUN, 0.1),
            Row(f"{what} are at their first line, torch not yet imported", "user", "s", TORCHRUN),
        ),
    )


# ------------------------------------------------------------------------------------------------------------- idling


def _idle(size: Size) -> Experiment:
    def idled(launcher: Launcher) -> Turn:
        def turn() -> Values:
            with Job(launcher(size.few, "collective.py"), hold=True) as job:
                job.until("held", size.few)
                job.watch(1.0)  # what starting up still owes
                below = set(kernel.descendants(job.pid))
                for rank in job.pids("held").values():
                    below -= {rank, *kernel.descendants(rank)}
                watched = {"launcher": [job.pid], "zygote": sorted(below)}
                before = {name: _activity(pids) for name, pids in watched.items()}
                job.watch(size.idle)
                values: Values = {}
                for name, pids in watched.items():
                    if pids:
                        cpu, switches, memory = _activity(pids)
                        values[f"{name}_cpu"] = cpu - before[name][0]
                        values[f"{name}_switches"] = switches - before[name][1]
                        values[f"{name}_memory"] = memory
                job.release()
                job.succeed()
                return values

        return turn

    what = f"{size.few} sleeping ranks for {size.idle:g} s, --no-history"
    return Experiment(
        "idle",
        {OURS: idled(contenders.ddplaunch("--no-history")), TORCHRUN: idled(contenders.torchrun())},
        (
            Row(f"{what}: launcher's context switches", "launcher_switches", "", None, 0),
            Row(f"{what}: launcher's CPU", "launcher_cpu", "ms", None, 0),
            Row(f"{what}: launcher's RSS", "launcher_memory", "MB", None, 40),
            Row(f"{what}: zygote's context switches", "zygote_switches", "", None, 0),
            Row(f"{what}: zygote's CPU", "zygote_cpu", "ms", None, 0),
            Row(f"{what}: zygote's RSS, mostly shared with the ranks", "zygote_memory", "MB"),
        ),
        rounds=2,
    )


def _activity(pids: list[int]) -> tuple[float, int, float]:
    return (
        sum(kernel.processor_ms(pid) for pid in pids),
        sum(kernel.switches(pid) for pid in pids),
        sum(kernel.resident_memory(pid) for pid in pids),
    )


# ------------------------------------------------------------------------------------------------------------- output

_LINE = re.compile(rb"(?:\[(\d+)\] |\[default(\d+)\]:)rank (\d+) line (\d+) x{60} end")


def _output(size: Size) -> Experiment:
    def printed(launcher: Launcher) -> Turn:
        def turn() -> Values:
            variables = {"BENCH_LINES": str(size.lines)}
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "stdout"
                with Job(launcher(size.few, "lines.py"), variables, hold=True, output=path) as job:
                    job.until("held", size.few)
                    job.release()
                    job.succeed()
                    assert job.ended is not None
                    damaged = _damaged(path, size.few, size.lines)
                    seconds = job.ended - min(job.times("first"))
                    return {"seconds": seconds, "cpu": job.cpu, "damaged": damaged}

        return turn

    what = f"{size.few} ranks × {size.lines:,} lines with prefixes into a file"
    return Experiment(
        "output",
        {OURS: printed(contenders.ddplaunch()), "torchrun --tee 3": printed(contenders.torchrun("--tee", "3"))},
        (
            Row(f"{what}: first line to exit", "seconds", "s", "torchrun --tee 3", 1.0),
            Row(f"{what}: lines lost, torn, doubled or out of order", "damaged", "", None, 0),
            Row(f"{what}: CPU of the whole job", "cpu", "CPU-s", "torchrun --tee 3"),
        ),
    )


def _damaged(path: Path, ranks: int, lines: int) -> int:
    """Count the lines that are not where they belong; an untouched line follows its rank's previous one."""
    expected = dict.fromkeys(range(ranks), 0)
    whole = wrong = 0
    with open(path, "rb") as file:
        for line in file:
            match = _LINE.fullmatch(line.rstrip(b"\n"))
            rank = int(match[3]) if match else -1
            if match is None or int(match[1] or match[2]) != rank or int(match[4]) < expected.get(rank, lines):
                wrong += 1
                continue
            expected[rank] = int(match[4]) + 1
            whole += 1
    return wrong + max(0, ranks * lines - whole - wrong)


# ------------------------------------------------------------------------------------------------------------ dry run


def _dry_run(size: Size) -> Experiment:
    def planned(nodes: int) -> Turn:
        def turn() -> Values:
            options = ("--nnodes", str(nodes), "--dry-run", "--json")
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "plan.json"
                with Job(contenders.ddplaunch(*options)(8, "collective.py"), output=path) as job:
                    job.succeed()
                    plan = json.loads(path.read_text())
                    if len(plan["ranks"]) != plan["world_size"] or plan["world_size"] != 8 * nodes:
                        raise Failed(f"the plan has {len(plan['ranks'])} ranks")
                    return {f"wall_{nodes}": job.lasted}

        return turn

    def both() -> Values:
        return {**planned(2)(), **planned(size.nodes)()}

    return Experiment(
        "dry-run",
        {OURS: both, PASS: lambda: run(contenders.python("pass"))},
        (
            Row("--dry-run --json, 2 nodes × 8", "wall_2", "s", PASS, 4.5, "wall"),
            Row(f"--dry-run --json, {size.nodes:,} nodes × 8", f"wall_{size.nodes}", "s", None, 1.0),
        ),
    )


def _bare(size: Size) -> Experiment:
    """What the launcher itself takes: the ranks do nothing, and nothing is imported for them."""
    command = contenders.ddplaunch("--no-python")(size.few, "/bin/true")
    return Experiment(
        "bare",
        {OURS: lambda: run(command), PASS: lambda: run(contenders.python("pass"))},
        (Row(f"{size.few} × /bin/true: the whole command", "wall", "s", PASS),),
    )


# ---------------------------------------------------------------------------------------------- asking a running job


def _inspection(size: Size) -> Experiment:
    """What inspection and history cost a run that is not asked."""

    def whole(*options: str) -> Turn:
        return lambda: _run_to(contenders.ddplaunch(*options)(size.many, "collective.py"), "collective", size.many)

    ranks = f"{size.many} ranks, with inspection and history"
    return Experiment(
        "inspection",
        {OURS: whole(), WITHOUT: whole("--no-inspect", "--no-history")},
        (
            Row(f"{ranks}: the whole command", "wall", "s", WITHOUT, 1.02),
            Row(f"{ranks}: CPU of the whole job", "cpu", "CPU-s", WITHOUT, 1.02),
        ),
    )


def _stacks(size: Size) -> Experiment:
    """How long a job takes to answer who waits for whom: all ranks but one wait in a collective."""
    from ddplaunch.core.control_socket import client
    from ddplaunch.core.control_socket.socket_dir import list_sockets
    from ddplaunch.features.inspect.diagnosis.inspection import Detail
    from ddplaunch.features.inspect.request import InspectJobRequest

    def asked(ranks: int) -> Values:
        waiting = {"BENCH_ABSENT": "1"}
        with Job(contenders.ddplaunch()(ranks, "collective.py"), waiting, hold=True) as job:
            job.until("held", ranks)
            (door,) = [path for path in list_sockets() if path.endswith(f".{job.pid}")]
            began = time.monotonic()
            found = client.send_request(door, InspectJobRequest(Detail.WAITS)).inspection
            seconds = time.monotonic() - began
            if not all(rank.threads for rank in found.ranks):
                raise Failed("a rank without a stack")
            job.release()
            job.finish()  # with the absent rank's end the others fail
            return {f"stacks_{ranks}": seconds}

    def both() -> Values:
        return {**asked(size.many), **asked(8 * size.many)}

    return Experiment(
        "stacks",
        {OURS: both},
        (
            Row(f"stacks and collectives of {size.many} ranks", f"stacks_{size.many}", "s", None, 0.5),
            Row(f"stacks and collectives of {8 * size.many} ranks", f"stacks_{8 * size.many}", "s", None, 2.0),
        ),
        rounds=3,
    )


# ------------------------------------------------------------------------------------------------------------ preload


def _preload(size: Size, label: str, program: str, last: str) -> Experiment:
    """What preloading torch._dynamo saves a job that needs it, and costs one that does not."""
    plain = "--preload torch,torch.distributed"  # which torch imports anyway

    def preloaded(modules: str) -> Turn:
        return lambda: _run_to(contenders.ddplaunch("--preload", modules)(size.few, program), last, size.few)

    what = f"{size.few} ranks, {label}, `--preload torch,torch._dynamo`"
    return Experiment(
        f"preload-{last}",
        {OURS: preloaded("torch,torch._dynamo"), plain: preloaded("torch,torch.distributed")},
        (Row(f"{what}: command to exit", "wall", "s", plain), Row(f"{what}: CPU", "cpu", "CPU-s", plain)),
    )


def _tests_in_ranks(size: Size) -> Experiment:
    """pytest with small tests of four ranks each, which make a process group, reduce a number and destroy it."""

    def tested(way: str) -> Turn:
        file = str(contenders.PROGRAMS / "tests_in_ranks.py")
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:hydra_pytest",
            "--noconftest",
            file,
        ]
        return lambda: run(words, {"BENCH_WAY": way, "BENCH_TESTS": str(size.tests)})

    case = "torch's MultiProcessTestCase"
    what = f"{size.tests} small tests of 4 ranks: the whole of pytest"
    return Experiment(
        "tests",
        {OURS: tested("ranks"), case: tested("case"), SPAWN: tested("spawn")},
        (Row(what, "wall", "s", case, 0.1), Row(f"{what}, over spawn", "wall", "s", SPAWN, 0.1)),
        rounds=1,
    )
