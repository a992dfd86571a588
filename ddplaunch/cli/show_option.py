"""Parses ``--show``, like "0,3" or "all,local:0/err": the ranks whose output is shown; and ``--merge``."""

from __future__ import annotations

from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Options, OptionSource
from ddplaunch.base.text import format_rank_range, format_ranks
from ddplaunch.base.tty import is_interactive
from ddplaunch.core.node_config import ShowRule, ShowRules
from ddplaunch.core.options import Output
from ddplaunch.core.prefix import uses_rank_only
from ddplaunch.system.plan.numbers import parse_int
from ddplaunch.system.plan.plan import Plan

_STREAMS = {"": frozenset({1, 2}), "out": frozenset({1}), "err": frozenset({2}), "none": frozenset[int]()}
LAST = "last"  # the rank with the highest number: in pipeline parallelism it prints the loss
_LOCAL = "local:"  # the numbers after it are local ranks


def read_show_rules(options: Options, plan: Plan) -> ShowRules:
    """Return whose output is shown. Raises UsageError if a rank of ``--show`` or ``--stdin`` does not exist."""
    full_tracebacks = (
        options.sources["show"] is not OptionSource.DEFAULT or plan.world_size == 1 or not is_interactive(2)
    )
    output = options[Output]
    shown = replace(_parse_show(output.show, plan), full_tracebacks=full_tracebacks)
    here = [rank.rank for rank in plan.local_ranks]
    if output.stdin is not None and plan.nnodes == 1 and output.stdin not in here:
        what = f"--stdin {output.stdin}: this node has {format_rank_range(here[0], here[-1])}"
        raise UsageError(what, f"--stdin {here[0]}")
    return shown


def merges_equal_lines(options: Options) -> bool | None:
    """Return whether equal lines of several ranks are merged; None: only in a terminal."""
    output = options[Output]
    return output.merge if uses_rank_only(output.prefix) and (output.merge or output.stdin is None) else False


def _parse_show(text: str, plan: Plan) -> ShowRules:
    """Parse --show. Raises UsageError if it is not a list of ranks, or a rank of a single-node job does not exist.

    Local ranks may be missing: their number differs between nodes, and torchrun's options accept any.
    """
    rules: list[ShowRule] = []
    local = False
    for part in text.split(","):
        if part.startswith(_LOCAL):
            local, part = True, part.removeprefix(_LOCAL)
        who, slash, stream = part.partition("/")
        number = parse_int(who)
        if who == LAST:
            if plan.min_nodes is not None and not local:
                raise UsageError(f"--show {text}: the last rank changes with the number of nodes", "--show local:last")
            number = (len(plan.local_ranks) if local else plan.world_size) - 1
        known = who in ("all", "none") or (number is not None and number >= 0)
        if not known or stream not in _STREAMS or bool(slash) != bool(stream):
            what = f"--show {text}: expected all, none, last, ranks like 0,3, or local:0"
            raise UsageError(what, "0/err is only the stderr of rank 0")
        streams = _STREAMS["none" if who == "none" else stream]
        rules.append(ShowRule(None, streams=streams) if number is None else ShowRule(number, local, streams))
        if number is not None and not local and plan.nnodes == 1 and number >= plan.world_size:
            what = f"--show {text}: the job has {format_rank_range(0, plan.world_size - 1)}"
            raise UsageError(what, "all, none, or ranks like 0")
    return ShowRules(tuple(rules))


def missing_local_ranks_note(shown: ShowRules, plan: Plan) -> str | None:
    """Return a note on local ranks in --show that node 0 does not have, None if there are none."""
    count = len(plan.local_ranks)
    missing = {rule.rank for rule in shown.rules if rule.is_local_rank and rule.rank is not None and rule.rank >= count}
    if not missing or plan.node_rank or plan.started_rank:
        return None
    return f"--show: node 0 has no local {format_ranks(missing)}, only local {format_rank_range(0, count - 1)}"
