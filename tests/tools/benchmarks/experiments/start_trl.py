"""trl, peft and datasets: a run fails whose ranks report another result than those of the first run under torchrun."""

import re
import tempfile
from functools import cache
from pathlib import Path

from tests.tools.benchmarks import harness as bench

REQUIRES = ("trl", "peft", "datasets")
RANKS = 2


def _run_and_read_reports(launcher: bench.Launcher) -> tuple[bench.Values, list[bytes]]:
    with tempfile.TemporaryDirectory(prefix="benchmark-reports-") as folder:
        path = Path(folder) / "stdout"
        # Sums depend on the number of threads.
        values = bench.measure_command(launcher(RANKS, "trl_sft.py"), {"OMP_NUM_THREADS": "1"}, path)
        reports = sorted(re.findall(rb'\{"rank".*?\}', path.read_bytes()))
    if len(reports) != RANKS:
        raise bench.BenchmarkError(f"{len(reports)} of {RANKS} ranks reported")
    return values, reports


@cache
def _expected_reports() -> list[bytes]:
    return _run_and_read_reports(bench.LAUNCHERS[bench.TORCHRUN])[1]


def _run_and_compare(launcher: bench.Launcher) -> bench.Values:
    values, reports = _run_and_read_reports(launcher)
    for ours, theirs in zip(reports, _expected_reports(), strict=True):
        if ours != theirs:
            raise bench.BenchmarkError(f"reported {ours.decode()}, under torchrun {theirs.decode()}")
    return values


def experiment(size: bench.Size) -> bench.Experiment:
    what = f"{RANKS} ranks of trl, peft and datasets, results as under torchrun to the last digit: CPU"
    turns = bench.compare(_run_and_compare, bench.DDPLAUNCH, bench.TORCHRUN)
    return bench.Experiment(turns, (bench.Row(what, "cpu", "CPU-s", bench.TORCHRUN),), rounds=3)
