"""The policy of this node alone, from the options: how its ranks start, what is shown, what runs beside them."""

from __future__ import annotations

import os
import sys

from ddplaunch import TYPE_CHECKING
from ddplaunch.cli import over_ssh, show, sidecars
from ddplaunch.cli.options import Source
from ddplaunch.cli.warmth import read_warmth
from ddplaunch.dataclass import replace
from ddplaunch.errors import UsageError
from ddplaunch.output.terminal import can_draw, watched

if TYPE_CHECKING:
    from ddplaunch.agent.policy import Policy, Shown
    from ddplaunch.cli.options import Options
    from ddplaunch.clusters.finding import Finding
    from ddplaunch.plan.plan import Plan
    from ddplaunch.preload.choice import Choice

QUIET = 5.0
"""Seconds that nodes which somebody starts all at once have to find each other before we say that we wait."""


def read_shown(options: Options, plan: Plan) -> Shown:
    """Return whose output is shown; refuse ranks of ``--show`` and ``--stdin`` that this node knows are not there."""
    whole = options.sources["show"] is not Source.DEFAULT or plan.world_size == 1 or not watched(2)
    shown = replace(show.read(options.show, plan), whole=whole)
    here = [rank.rank for rank in plan.local_ranks]
    if options.stdin is not None and plan.nnodes == 1 and options.stdin not in here:
        ranks = show.ranks(here[0], here[-1])
        raise UsageError(f"--stdin {options.stdin}: this node has {ranks}", f"--stdin {here[0]}")
    if options.stdin is not None and options.ui:
        what = f"--ui does not work with --stdin {options.stdin}: both read the keys typed here"
        raise UsageError(what, "leave --ui out, and type ddplaunch top in another terminal")
    return shown


def read_policy(options: Options, plan: Plan, shown: Shown, finding: Finding | None) -> Policy:
    """Return the policy; ``finding`` is what a system says that starts all nodes at once."""
    from ddplaunch.agent.policy import Policy
    from ddplaunch.console import colour_wanted
    from ddplaunch.output.sink import PATIENCE
    from ddplaunch.target.target import Kind

    by_ssh = over_ssh.STARTED in os.environ
    warm, cold = read_warmth(options)
    return Policy(
        preload=choose_preload(options, plan),
        show=shown,
        stdin=options.stdin,
        log_dir=options.log_dir,
        inspect=not options.no_inspect and plan.target.kind is not Kind.PROGRAM,
        history=not options.no_history,
        patience=over_ssh.PATIENCE if by_ssh else PATIENCE,
        quiet=QUIET if by_ssh or finding is not None else 0.0,
        preempt_signal=options.preempt_signal,
        preempt_forward=options.preempt_forward,
        colour=colour_wanted(),
        prefix=options.prefix,
        sidecars=sidecars.read(options) if plan.node_rank == 0 else (),
        warm=warm,
        cold=cold,
        in_step=finding is not None and finding.cluster == "slurm" and not finding.is_script,
        live=options.ui and not why_no_view(options),
    )


def why_no_view(options: Options) -> str | None:
    """Why ``--ui`` shows nothing here, where it does not."""
    if not options.ui:
        return None
    if not (watched(1) or watched(2)):
        return "--ui shows nothing here: this is not a terminal"
    if not can_draw():
        return f"--ui shows nothing here: TERM={os.environ.get('TERM', '')} cannot move the cursor"
    return None


def choose_preload(options: Options, plan: Plan) -> Choice:
    """Choose what the zygote imports; a node with one rank and no restarts has one only where that alone is quicker."""
    from ddplaunch.preload.choice import AUTO, Choice, choose

    if options.start == "exec" or (options.start == "auto" and sys.platform != "linux"):
        return Choice()
    preload = options.preload or AUTO
    unasked = options.start == "auto" and preload == AUTO
    lone = unasked and len(plan.local_ranks) == 1 and not options.max_restarts
    own = plan.environment(plan.local_ranks[0])
    return choose(plan.target, preload, {**os.environ, **plan.shared}, own, lone=lone)
