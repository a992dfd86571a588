"""``--show``: from "0,3" or "all,local:0/err" to whose output is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.errors import UsageError
from ddplaunch.plan.numbers import whole

if TYPE_CHECKING:
    from ddplaunch.agent.policy import Shown
    from ddplaunch.plan.plan import Plan

_STREAMS = {"": frozenset({1, 2}), "out": frozenset({1}), "err": frozenset({2}), "none": frozenset[int]()}
_LOCAL = "local:"
"""Numbers behind it are local ranks."""


def read(text: str, plan: Plan) -> Shown:
    """Read it.

    Raises:
        UsageError: it is no list of ranks, or names one that there is not.
    """
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
            raise UsageError(
                f"--show {text}: expected all, none, ranks like 0,3, or local:0", "0/err is only the stderr of rank 0"
            )
        if who == "none":
            rules.append(Rule(None, streams=frozenset()))
        elif who == "all":
            rules.append(Rule(None, streams=_STREAMS[stream]))
        elif number is not None:
            rules.append(Rule(number, local, _STREAMS[stream]))
            _check(number, local, text, plan)
    return Shown(tuple(rules))


def _check(number: int, local: bool, text: str, plan: Plan) -> None:
    """Refuse a rank that there is not, as far as this node knows."""
    if local:
        count, whose = len(plan.local_ranks), "this node has local"
    elif plan.nnodes == 1:
        count, whose = plan.world_size, "the job has"
    else:
        return
    if number >= count:
        raise UsageError(
            f"--show {text}: {whose} {ranks(0, count - 1)}", f"all, none, or ranks like {'local:' * local}0"
        )


def ranks(first: int, last: int) -> str:
    """Name them, for an error."""
    return f"ranks {first} to {last}" if last > first else f"rank {first} only"
