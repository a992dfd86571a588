"""Asks the ranks of this node what they are doing: the kernel, and each of them."""

from __future__ import annotations

import os
import time

from ddplaunch.agent.ranks import Ranks
from ddplaunch.diagnosis.inspection import Condition, Inspection, RankInspection

_CONDITIONS = {"T": Condition.STOPPED, "t": Condition.STOPPED, "D": Condition.BLOCKED}
_TICK = os.sysconf("SC_CLK_TCK")


def inspect(ranks: Ranks) -> Inspection:
    """What the kernel says of each rank."""
    found = tuple(_inspected(ranks, number) for number in sorted(rank.rank for rank in ranks.plan.local_ranks))
    return Inspection(time.time(), found, ranks.plan.world_size)


def _inspected(ranks: Ranks, number: int) -> RankInspection:
    host = ranks.plan.ranks[number].host or ""
    process = ranks.processes.get(number)
    if process is None:
        return RankInspection(number, host, 0, Condition.EXITED if not ranks.pending else Condition.PENDING)
    try:
        with open(f"/proc/{process.pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return RankInspection(number, host, process.pid, Condition.EXITED)
    condition = _CONDITIONS.get(fields[0].decode(), Condition.ALIVE)
    return RankInspection(number, host, process.pid, condition, cpu=sum(map(int, fields[11:15])) / _TICK)
