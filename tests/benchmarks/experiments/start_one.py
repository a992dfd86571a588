"""One rank, beside one process of plain python."""

from tests.benchmarks.contenders import ddplaunch, plain
from tests.benchmarks.runner import OURS, Experiment, Row, Size
from tests.benchmarks.turns import run

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
PLAIN = "plain python"


def experiment(size: Size) -> Experiment:
    return Experiment(
        {
            OURS: lambda: run(ddplaunch()(1, "collective.py")),
            PLAIN: lambda: run(plain("collective.py"), ALONE),
        },
        (Row("one rank, one all_reduce: the whole command", "wall", "s", PLAIN),),
    )
