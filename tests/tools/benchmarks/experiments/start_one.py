"""One rank, beside one process of plain python."""

from tests.tools.benchmarks import harness as bench

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def experiment(size: bench.Size) -> bench.Experiment:
    return bench.Experiment(
        {
            bench.DDPLAUNCH: lambda: bench.measure_command(bench.ddplaunch()(1, "collective.py")),
            bench.PLAIN: lambda: bench.measure_command(bench.plain("collective.py"), ALONE),
        },
        (bench.Row("one rank, one all_reduce: the whole command", "wall", "s", bench.PLAIN),),
    )
