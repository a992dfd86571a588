"""What launcher and zygote do while the ranks sleep: how often they wake, and their CPU time."""

import re
import time
from pathlib import Path

from tests.benchmarks.harness import (
    OURS,
    TORCHRUN,
    Experiment,
    Job,
    Launcher,
    Row,
    Size,
    Values,
    compare,
    cpu_ms,
    ddplaunch,
    descendants,
)


def _switches(pid: int) -> int:
    """How often the threads of a process went to sleep or were interrupted (context switches of both kinds)."""
    threads = Path(f"/proc/{pid}/task").glob("*/status")
    return sum(int(each) for thread in threads for each in re.findall(r"ctxt_switches:\t(\d+)", thread.read_text()))


def experiment(size: Size) -> Experiment:
    def idled(launcher: Launcher) -> Values:
        with Job(launcher(size.few, "collective.py"), hold=True) as job:
            job.until("held", size.few)
            time.sleep(1.0)  # what starting up still owes
            others = {each.pid for each in descendants(job.pid)}
            for rank in job.pids("held").values():
                others -= {rank, *(each.pid for each in descendants(rank))}
            watched = {"launcher": [job.pid], "zygote": sorted(others)}
            reads = {"switches": _switches, "cpu": cpu_ms}

            def activity() -> Values:
                return {
                    f"{name}_{what}": float(sum(map(read, pids)))
                    for name, pids in watched.items()
                    if pids
                    for what, read in reads.items()
                }

            before = activity()
            time.sleep(size.idle_s)
            values = {name: value - before[name] for name, value in activity().items()}
            job.release()
            job.succeed()
            return values

    what = f"{size.few} sleeping ranks for {size.idle_s:g} s, --no-history"
    return Experiment(
        compare(idled, TORCHRUN, **{OURS: ddplaunch("--no-history")}),
        tuple(
            Row(f"{what}: {name}'s {shown}", f"{name}_{value}", unit)
            for name in ("launcher", "zygote")
            for value, shown, unit in (("switches", "context switches", ""), ("cpu", "CPU", "ms"))
        ),
        rounds=2,
    )
