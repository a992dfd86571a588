"""What launcher and zygote do while the ranks sleep."""

from tests.benchmarks import kernel
from tests.benchmarks.contenders import Launcher, ddplaunch
from tests.benchmarks.measure import Job
from tests.benchmarks.runner import OURS, TORCHRUN, Experiment, Row, Size, Values
from tests.benchmarks.turns import compare


def _activity(pids: list[int]) -> Values:
    return {
        "switches": sum(map(kernel.switches, pids)),
        "cpu": sum(map(kernel.processor_ms, pids)),
        "memory": sum(map(kernel.resident_memory, pids)),
    }


def experiment(size: Size) -> Experiment:
    def idled(launcher: Launcher) -> Values:
        with Job(launcher(size.few, "collective.py"), hold=True) as job:
            job.until("held", size.few)
            job.watch(1.0)  # what starting up still owes
            others = set(kernel.descendants(job.pid))
            for rank in job.pids("held").values():
                others -= {rank, *kernel.descendants(rank)}
            watched = {"launcher": [job.pid], "zygote": sorted(others)}
            before = {name: _activity(pids) for name, pids in watched.items()}
            job.watch(size.idle_s)
            values: Values = {}
            for name, pids in watched.items():
                if pids:
                    after = _activity(pids)
                    values |= {f"{name}_{key}": after[key] - before[name][key] for key in ("switches", "cpu")}
                    values[f"{name}_memory"] = after["memory"]
            job.release()
            job.succeed()
            return values

    what = f"{size.few} sleeping ranks for {size.idle_s:g} s, --no-history"
    return Experiment(
        compare(idled, TORCHRUN, **{OURS: ddplaunch("--no-history")}),
        tuple(
            Row(f"{what}: {name}'s {shown}", f"{name}_{value}", unit)
            for name in ("launcher", "zygote")
            for value, shown, unit in (
                ("switches", "context switches", ""),
                ("cpu", "CPU", "ms"),
                ("memory", "RSS", "MB"),
            )
        ),
        rounds=2,
    )
