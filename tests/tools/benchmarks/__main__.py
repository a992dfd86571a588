"""``python -m tests.tools.benchmarks``: compares ddplaunch with torchrun, torch.multiprocessing.spawn and plain python.

Each file of ``experiments/`` is an experiment. It measures; it asserts nothing about seconds. The exit code is 1 where
ddplaunch itself failed to do its part.
"""

import argparse
import os
import pkgutil
import platform
import signal
import sys
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

from tests.tools.benchmarks import experiments
from tests.tools.benchmarks.harness import DDPLAUNCH, QUICK, Experiment, Size, render_table


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.benchmarks", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each contender [default: 5; with --quick 1]")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="what names begin with; see --list")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller: does it all work?")
    parser.add_argument("--list", action="store_true", help="print the names of the experiments and stop")
    options = parser.parse_args()
    size = QUICK if options.quick else Size()
    size = replace(size, rounds=options.rounds or size.rounds)
    found = {each.name: import_module(f"{experiments.__name__}.{each.name}") for each in _modules()}
    if options.list:
        print("\n".join(found))
        return 0
    if unknown := [each for each in options.only if not any(name.startswith(each) for name in found)]:
        parser.error(f"no experiment is called {', '.join(unknown)}: see --list")

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that jobs are cleaned up
    machine = (
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} before the start, Python "
        f"{platform.python_version()}, torch {version('torch')}, ddplaunch {version('ddplaunch')}"
    )
    measured: dict[str, Experiment] = {}
    for name, module in found.items():
        if not name.startswith(tuple(options.only)):
            continue
        if missing := [each for each in getattr(module, "REQUIRES", ()) if find_spec(each) is None]:
            print(f"{name}: skipped, {', '.join(missing)} not installed", file=sys.stderr)
            continue
        measured[name] = module.experiment(size)
        measured[name].measure(name, size)
    print(f"{machine}; {size.rounds} round{'s' * (size.rounds != 1)}, medians.\n\n{render_table(measured)}")
    return int(any(experiment.failures(DDPLAUNCH) for experiment in measured.values()))


def _modules() -> list[pkgutil.ModuleInfo]:
    return sorted(pkgutil.iter_modules(experiments.__path__), key=lambda each: each.name)


if __name__ == "__main__":
    sys.exit(main())
