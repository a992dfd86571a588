"""The command: ``python -m tests.gpu_check PART``."""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.fake_nvml import compile_library
from tests.gpu_check import end, explained, fidelity, seen, start
from tests.gpu_check.harness import CHECKS, FAILED, Result, describe_machine, run_checks

GROUPS = [module.__name__.rpartition(".")[2] for module in (start, end, explained, seen, fidelity)]
BUDGET_S = 235.0  # of a part: a call on a lent machine may take some minutes


def main(words: list[str] | None = None) -> int:
    """Run the checks of a part; return 1 if one has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_check", description=__doc__)
    parser.add_argument("part", nargs="?", type=int, choices=(1, 2), help="default: both")
    parser.add_argument("--simulate", action="store_true", help="as on a machine without a GPU")
    parser.add_argument("--quick", action="store_true", help="only what takes less than a second without a GPU")
    parser.add_argument("--only", metavar="WORD", help="the checks of this group, or with this in their name")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the result, gpu_check-PART.json")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="after which none is begun")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="print the results in these files")
    given = parser.parse_args(words)
    if given.table:
        print(make_table(given.table), end="")
        return 0
    is_simulated = given.simulate or not Path("/dev/nvidia0").exists()
    if not is_simulated:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # with which conftest hides GPUs
    wanted = [
        each
        for each in sorted(CHECKS, key=lambda one: GROUPS.index(one.group))
        if given.part in (None, each.part)
        and (each.is_quick or not given.quick)
        and (not given.only or given.only == each.group or given.only in each.name)
    ]
    with tempfile.TemporaryDirectory(prefix="gpu-check-nvml-") as folder:
        if (nvml := compile_library(Path(folder))) is None:
            print("no C compiler, which simulates GPUs", file=sys.stderr)
            return 2
        results = list[Result]()
        for result in run_checks(wanted, nvml, given.budget, is_simulated=is_simulated):
            results.append(result)
            print(f"{result.outcome:12} {result.seconds:6.1f} s  {result.group}: {result.title}", flush=True)
            if result.detail:
                print("\n".join(f"    {line}" for line in result.detail.splitlines()[:30]), flush=True)
    machine = {} if given.quick else describe_machine(is_simulated=is_simulated)
    name = f"gpu_check-{given.part or 'all'}.json"
    content = {"machine": machine, "taken": time.strftime("%Y-%m-%d"), "checks": [asdict(each) for each in results]}
    (given.out / name).write_text(json.dumps(content, indent=2) + "\n")
    counts = {outcome: sum(each.outcome == outcome for each in results) for outcome in {r.outcome for r in results}}
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())), "of", len(results))
    return int(any(each.outcome == FAILED for each in results))


def make_table(files: list[Path]) -> str:
    """The results as a table for docs/performance.md, with the machine above it."""
    found = [json.loads(path.read_text()) for path in files]
    machine = found[0]["machine"]
    card = machine.get("card") or "a simulated GPU"
    head = (
        f"{card}, driver {machine.get('driver')}, CUDA {machine.get('cuda')}, NCCL {machine.get('nccl')}, "
        f"torch {machine.get('torch')}, {machine.get('cpus')} CPUs, {found[0]['taken']}:"
    )
    rows = [
        f"| {each['group']} | {each['title']} | {each['outcome']} | {' '.join(each['detail'].split())[:160]} |"
        for one in found
        for each in one["checks"]
    ]
    return "\n".join([head, "", "| | check | result | measured, or left |", "|---|---|---|---|", *rows, ""])


if __name__ == "__main__":
    sys.exit(main())
