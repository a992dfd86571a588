"""``python -m tests.benchmarks``: compares ddplaunch with torchrun, torch.multiprocessing.spawn and plain python.

Contenders take turns within each round (A B C, A B C, …) after one round that warms the page cache and does not count.
It measures; it asserts nothing about seconds. The exit code is 1 where ddplaunch itself failed to do its part.
"""

import argparse
import os
import platform
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path

from tests.benchmarks.contenders import OURS
from tests.benchmarks.experiments import QUICK, Experiment, Size, Values, all_experiments
from tests.benchmarks.measure import Failed
from tests.benchmarks.profile import profile_experiments
from tests.benchmarks.report import Results, table
from tests.benchmarks.starts import picture, start_experiments


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each contender [default: 5; with --quick 1]")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="what names begin with; see --list")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller: does it all work?")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw start-trainer and warm-trainer there, as SVG")
    parser.add_argument("--list", action="store_true", help="print the names of the experiments and stop")
    options = parser.parse_args()
    size = QUICK if options.quick else Size()
    experiments = [*all_experiments(size), *start_experiments(size), *profile_experiments(size)]
    if options.list:
        print("\n".join(experiment.name for experiment in experiments))
        return 0
    unknown = [name for name in options.only if not any(each.name.startswith(name) for each in experiments)]
    if unknown:
        parser.error(f"no experiment is called {', '.join(unknown)}: see --list")
    chosen = [each for each in experiments if not options.only or each.name.startswith(tuple(options.only))]
    rounds = options.rounds or (1 if options.quick else 5)

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that jobs are cleaned up
    machine = _machine()
    all_results = [_measure(experiment, min(rounds, experiment.rounds), not options.quick) for experiment in chosen]
    print(f"{machine}; {rounds} round{'s' * (rounds != 1)}, medians.\n")
    print(table(all_results, judged=not options.quick))  # the targets are about the full sizes
    if options.plot:
        options.plot.write_text(picture(all_results))
    return int(any(results.failures(OURS) for results in all_results))


def _measure(experiment: Experiment, rounds: int, warm_up: bool) -> Results:
    results = Results(experiment)
    for number in range(-warm_up, rounds):
        for contender, turn in experiment.turns.items():
            began = time.monotonic()
            outcome: Values | str
            try:
                outcome = turn()
            except Failed as failed:
                outcome = str(failed)
            if number >= 0:
                results.add(contender, outcome)
            found = outcome if isinstance(outcome, str) else ", ".join(f"{key} {it:.4g}" for key, it in outcome.items())
            label = f"round {number + 1}" if number >= 0 else "warm-up"
            took = time.monotonic() - began
            print(f"{experiment.name}, {label}, {contender} ({took:.1f} s): {found}", file=sys.stderr)
    return results


def _machine() -> str:
    return (
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} before the start, Python "
        f"{platform.python_version()}, torch {version('torch')}, ddplaunch {version('ddplaunch')}"
    )


if __name__ == "__main__":
    sys.exit(main())
