"""Lines of all ranks with prefixes into a file: how fast, and how many of them are damaged."""

import re
import tempfile
from pathlib import Path

from tests.tools.benchmarks import harness as bench

TEE = "torchrun --tee 3"
_LINE = re.compile(rb"(?:\[(\d+)\] |\[default(\d+)\]:)rank (\d+) line (\d+) x{60} end")


def experiment(size: bench.Size) -> bench.Experiment:
    def measure_output(launcher: bench.Launcher) -> bench.Values:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "stdout"
            command = launcher(size.few, "lines.py")
            with bench.Job(command, variables={"BENCH_LINES": str(size.lines)}, hold=True, output=path) as job:
                job.wait_for_ranks("held", size.few)
                job.release()
                job.succeed()
                assert job.exited_at is not None
                seconds = job.exited_at - min(job.times("first"))
                return {"seconds": seconds, "damaged": _count_damaged(path, size.few, size.lines)}

    what = f"{size.few} ranks × {size.lines:,} lines with prefixes into a file"
    return bench.Experiment(
        bench.compare(measure_output, **{bench.DDPLAUNCH: bench.ddplaunch(), TEE: bench.torchrun("--tee", "3")}),
        (
            bench.Row(f"{what}: first line to exit", "seconds", "s", TEE),
            bench.Row(f"{what}: lines lost, torn, doubled or out of order", "damaged", ""),
        ),
    )


def _count_damaged(path: Path, ranks: int, lines: int) -> int:
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
