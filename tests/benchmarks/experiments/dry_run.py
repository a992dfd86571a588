"""A dry run of a small and of a large job."""

from tests.benchmarks.contenders import ddplaunch, python
from tests.benchmarks.runner import OURS, PASS, Experiment, Row, Size, Values
from tests.benchmarks.turns import run


def experiment(size: Size) -> Experiment:
    def planned() -> Values:
        found: Values = {}
        for nodes in (2, size.nodes):
            command = ddplaunch("--nnodes", str(nodes), "--dry-run", "--json")(8, "collective.py")
            found[f"wall_{nodes}"] = run(command)["wall"]
        return found

    return Experiment(
        {OURS: planned, PASS: lambda: run(python("pass"))},
        tuple(
            Row(f"--dry-run --json, {nodes:,} nodes × 8", f"wall_{nodes}", "s", PASS, "wall")
            for nodes in (2, size.nodes)
        ),
    )
