"""The memory of a whole job whose ranks idle after a collective."""

from tests.tools.benchmarks import harness as bench


def experiment(size: bench.Size) -> bench.Experiment:
    what = f"{size.many} ranks, idle: PSS of the whole job"
    return bench.Experiment(
        bench.compare(
            lambda launcher: bench.measure_memory(launcher(size.many, "collective.py"), size.many),
            *(bench.DDPLAUNCH, bench.TORCHRUN, bench.SPAWN),
        ),
        (bench.Row(what, "memory", "MB", bench.TORCHRUN),),
        rounds=3,
    )
