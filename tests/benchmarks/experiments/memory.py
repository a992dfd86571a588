"""The memory of a whole job whose ranks idle after a collective."""

from tests.benchmarks.harness import OURS, SPAWN, TORCHRUN, Experiment, Row, Size, compare, held


def experiment(size: Size) -> Experiment:
    what = f"{size.many} ranks, idle: PSS of the whole job"
    turns = compare(lambda launcher: held(launcher(size.many, "collective.py"), size.many), OURS, TORCHRUN, SPAWN)
    return Experiment(turns, (Row(what, "memory", "MB", TORCHRUN),), rounds=3)
