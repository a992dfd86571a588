"""A start from a zygote that is kept warm."""

from tests.benchmarks.contenders import ddplaunch, python
from tests.benchmarks.measure import Job
from tests.benchmarks.runner import IMPORT, OURS, PASS, Experiment, Row, Size, Values
from tests.benchmarks.turns import lasting_folder, run


def experiment(size: Size) -> Experiment:
    def warm() -> Values:
        with Job(ddplaunch("--warm")(size.many, "collective.py"), folder=lasting_folder("warm")) as job:
            job.succeed()
            return {"first": min(job.times("user")) - job.began, "wall": job.lasted}

    what = f"{size.many} ranks and one all_reduce, from a zygote kept warm"
    return Experiment(
        {OURS: warm, IMPORT: lambda: run(python("import torch")), PASS: lambda: run(python("pass"))},
        (
            Row(f"{what}: the whole command", "wall", "s", IMPORT),
            Row(f"{what}: command to the first rank's first line", "first", "s", PASS, "wall"),
        ),
    )
