"""``--show``: from "0,3" or "all,local:0/err" to whose output is shown."""

from __future__ import annotations

from ddplaunch.agent.policy import ShowRule, ShowRules
from ddplaunch.cli.options import OptionSource, RunOptions
from ddplaunch.dataclass import replace
from ddplaunch.errors import UsageError
from ddplaunch.output.prefix import uses_rank_only
from ddplaunch.output.terminal import is_interactive
from ddplaunch.plan.numbers import parse_int
from ddplaunch.plan.plan import Plan
from ddplaunch.words import format_ranks as named

_STREAMS = {"": frozenset({1, 2}), "out": frozenset({1}), "err": frozenset({2}), "none": frozenset[int]()}
_LOCAL = "local:"  # numbers behind it are local ranks


def read_show_rules(options: RunOptions, plan: Plan) -> ShowRules:
    """Return whose output is shown; refuse ranks of ``--show`` and ``--stdin`` that this node knows are not there."""
    whole = options.sources["show"] is not OptionSource.DEFAULT or plan.world_size == 1 or not is_interactive(2)
    shown = replace(_parse_show(options.show, plan), full_tracebacks=whole, merge=read_merge(options))
    here = [rank.rank for rank in plan.local_ranks]
    if options.stdin is not None and plan.nnodes == 1 and options.stdin not in here:
        what = f"--stdin {options.stdin}: this node has {format_rank_range(here[0], here[-1])}"
        raise UsageError(what, f"--stdin {here[0]}")
    if options.stdin is not None and options.ui:
        what = f"--ui does not work with --stdin {options.stdin}: both read the keys typed here"
        raise UsageError(what, "leave --ui out, and type ddplaunch top in another terminal")
    return shown


def read_merge(options: RunOptions) -> bool | None:
    """Return whether equal lines of several ranks are shown once; None: where a person looks."""
    able = uses_rank_only(options.prefix)
    if options.merge and not able:
        what = f"--merge does not work with --prefix {options.prefix}: a prefix names several ranks by {{rank}} alone"
        raise UsageError(what, "--prefix '[{rank}]'")
    return options.merge if able and (options.merge or options.stdin is None) else False


def _parse_show(text: str, plan: Plan) -> ShowRules:
    """Read it; refuse what is not a list of ranks, and ranks that this node knows are missing.

    Local ranks may be missing: nodes differ in how many they have, and torchrun's options name any.
    """
    rules: list[ShowRule] = []
    local = False
    for part in text.split(","):
        if part.startswith(_LOCAL):
            local, part = True, part.removeprefix(_LOCAL)
        who, slash, stream = part.partition("/")
        number = parse_int(who)
        known = who in ("all", "none") or (number is not None and number >= 0)
        if not known or stream not in _STREAMS or bool(slash) != bool(stream):
            what = f"--show {text}: expected all, none, ranks like 0,3, or local:0"
            raise UsageError(what, "0/err is only the stderr of rank 0")
        streams = _STREAMS["none" if who == "none" else stream]
        rules.append(ShowRule(None, streams=streams) if number is None else ShowRule(number, local, streams))
        if number is not None and not local and plan.nnodes == 1 and number >= plan.world_size:
            what = f"--show {text}: the job has {format_rank_range(0, plan.world_size - 1)}"
            raise UsageError(what, "all, none, or ranks like 0")
    return ShowRules(tuple(rules))


def missing_local_ranks(shown: ShowRules, plan: Plan) -> str | None:
    """Name the local ranks whose output was asked for, or not wanted, and that node 0 does not have."""
    count = len(plan.local_ranks)
    absent = {rule.rank for rule in shown.rules if rule.is_local_rank and rule.rank is not None and rule.rank >= count}
    if not absent or plan.node_rank or plan.started_rank:
        return None
    return f"nothing is shown of local {named(absent)}: this node has local {format_rank_range(0, count - 1)}"


def format_rank_range(first: int, last: int) -> str:
    """Name them, for an error."""
    return f"ranks {first} to {last}" if last > first else f"rank {first} only"
