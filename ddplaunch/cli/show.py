"""``--show``: from "0,3" or "all,local:0/err" to whose output is shown."""

from __future__ import annotations

from ddplaunch import TYPE_CHECKING
from ddplaunch.errors import UsageError
from ddplaunch.plan.numbers import whole

if TYPE_CHECKING:
    from ddplaunch.agent.policy import Shown
    from ddplaunch.plan.plan import Plan

_STREAMS = {"": frozenset({1, 2}), "out": frozenset({1}), "err": frozenset({2}), "none": frozenset[int]()}
_LOCAL = "local:"  # numbers behind it are local ranks


def read(text: str, plan: Plan) -> Shown:
    """Read it; refuse what is not a list of ranks, and ranks that there are not, as far as this node knows."""
    from ddplaunch.agent.policy import Rule, Shown

    rules: list[Rule] = []
    local = False
    for part in text.split(","):
        if part.startswith(_LOCAL):
            local, part = True, part.removeprefix(_LOCAL)
        who, slash, stream = part.partition("/")
        number = whole(who)
        known = who in ("all", "none") or (number is not None and number >= 0)
        if not known or stream not in _STREAMS or bool(slash) != bool(stream):
            what = f"--show {text}: expected all, none, ranks like 0,3, or local:0"
            raise UsageError(what, "0/err is only the stderr of rank 0")
        streams = _STREAMS["none" if who == "none" else stream]
        rules.append(Rule(None, streams=streams) if number is None else Rule(number, local, streams))
        if number is not None:
            _check(number, local, text, plan)
    return Shown(tuple(rules))


def _check(number: int, local: bool, text: str, plan: Plan) -> None:
    if local:
        count, whose = len(plan.local_ranks), "this node has local"
    elif plan.nnodes == 1:
        count, whose = plan.world_size, "the job has"
    else:
        return
    if number >= count:
        what = f"--show {text}: {whose} {ranks(0, count - 1)}"
        raise UsageError(what, f"all, none, or ranks like {'local:' * local}0")


def ranks(first: int, last: int) -> str:
    """Name them, for an error."""
    return f"ranks {first} to {last}" if last > first else f"rank {first} only"
