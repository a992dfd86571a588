"""A plan of sleeping ranks, for tests that fold its events."""

from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.plan.rank_layout import Node, Rank
from ddplaunch.system.target.target import Target, TargetKind


def plan(run_id: str = "r", ranks: int = 2) -> Plan:
    return Plan(
        run_id=run_id,
        target=Target(TargetKind.PROGRAM, "sleep", ("600",)),
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=0,
        nodes=(Node(0, "here", ranks, "typed"),),
        ranks=tuple(Rank(number, number, 0, "here", "cpu", None) for number in range(ranks)),
        variables={},
        max_restarts=9,
        backend=None,
        init_method=None,
        facts=(),
        notes=(),
    )
