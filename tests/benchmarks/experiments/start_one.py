"""One rank, beside one process of plain python."""

from tests.benchmarks.harness import OURS, PLAIN, Experiment, Row, Size, ddplaunch, plain, run

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def experiment(size: Size) -> Experiment:
    return Experiment(
        {
            OURS: lambda: run(ddplaunch()(1, "collective.py")),
            PLAIN: lambda: run(plain("collective.py"), ALONE),
        },
        (Row("one rank, one all_reduce: the whole command", "wall", "s", PLAIN),),
    )
