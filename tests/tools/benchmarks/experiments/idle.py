"""What launcher and zygote do while the ranks sleep: how often they wake, and their CPU time."""

import re
import time
from pathlib import Path

from tests.tools.benchmarks import harness as bench


def _count_switches(pid: int) -> float:
    """How often the threads of a process went to sleep or were interrupted (context switches of both kinds)."""
    threads = Path(f"/proc/{pid}/task").glob("*/status")
    found = (re.findall(r"ctxt_switches:\t(\d+)", thread.read_text()) for thread in threads)
    return float(sum(int(each) for both in found for each in both))


def experiment(size: bench.Size) -> bench.Experiment:
    def measure_idle(launcher: bench.Launcher) -> bench.Values:
        with bench.Job(launcher(size.few, "collective.py"), hold=True) as job:
            job.wait_for_ranks("held", size.few)
            time.sleep(1.0)  # what starting up still owes
            launched = job.launchers[0].pid
            others = {each.pid for each in bench.list_descendants(launched)}
            for rank in job.pids("held").values():
                others -= {rank, *(each.pid for each in bench.list_descendants(rank))}
            watched = {"launcher": [launched], **({"zygote": sorted(others)} if others else {})}

            def read_activity() -> bench.Values:
                return {
                    f"{name}_{what}": sum(map(read, pids))
                    for name, pids in watched.items()
                    for what, read in (("switches", _count_switches), ("cpu", bench.read_cpu_ms))
                }

            before = read_activity()
            time.sleep(size.idle_s)
            values = {name: value - before[name] for name, value in read_activity().items()}
            job.release()
            job.succeed()
            return values

    what = f"{size.few} sleeping ranks for {size.idle_s:g} s, --no-history"
    return bench.Experiment(
        bench.compare(measure_idle, bench.TORCHRUN, **{bench.DDPLAUNCH: bench.ddplaunch("--no-history")}),
        tuple(
            bench.Row(f"{what}: {name}'s {shown}", f"{name}_{value}", unit)
            for name in ("launcher", "zygote")
            for value, shown, unit in (("switches", "context switches", ""), ("cpu", "CPU", "ms"))
        ),
        rounds=2,
    )
