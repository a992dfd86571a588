"""The policy of this node alone, from the options: how its ranks start, what is shown, what runs beside them."""

from __future__ import annotations

import os

from ddplaunch import TYPE_CHECKING
from ddplaunch.agent.policy import Policy, Shown
from ddplaunch.cli.options import Options
from ddplaunch.cli.surroundings import OVER_SSH, in_step
from ddplaunch.cli.zygote import choose_preload, read_warmth
from ddplaunch.clusters.finding import Finding
from ddplaunch.console import colour_wanted
from ddplaunch.control.hello import cpu_build
from ddplaunch.errors import UsageError, shown
from ddplaunch.output.sink import PATIENCE
from ddplaunch.output.terminal import can_draw, in_foreground, watched
from ddplaunch.output.voice import VOICE
from ddplaunch.plan.plan import Plan
from ddplaunch.target.target import TargetKind

if TYPE_CHECKING:
    from ddplaunch.agent.policy import Command, Sidecar

PATIENCE_OVER_SSH = 1e6
"""Seconds, longer than any wait: SSH reads a launcher's output, slowly on purpose, and it notices when we are gone."""

QUIET = 5.0
"""Seconds that nodes which are started together have to find each other before we say that we wait."""


def read_policy(options: Options, plan: Plan, show: Shown, finding: Finding | None) -> Policy:
    """Return the policy; ``finding`` is what a system says that starts all nodes at once."""
    by_ssh = OVER_SSH in os.environ
    warm, cold = read_warmth(options)
    sidecars, told = _beside(options, plan)
    derived = {
        "preload": choose_preload(options, plan),
        "show": show,
        "debugpy": _of_editors(options.debugpy),
        "oom_report": _oom_report(options, plan),
        "parks": _has_person() or options.debug or options.post_mortem,
        "prompts": _has_person() and not options.ui and options.stdin is None,
        "inspect": not options.no_inspect and plan.target.kind is not TargetKind.PROGRAM,
        "history": not options.no_history,
        "patience": PATIENCE_OVER_SSH if by_ssh else PATIENCE,
        "quiet": QUIET if by_ssh or finding is not None else 0.0,
        "colour": colour_wanted(),
        "sidecars": sidecars,
        "metrics": _metrics(options.metrics),
        "notify": told,
        "warm": warm,
        "cold": cold,
        "in_step": in_step(options, finding, plan.node_rank),
        "live": options.ui and not why_no_view(options),
    }
    return Policy(**options.taken(Policy) | derived)


def _of_editors(typed: str | None) -> frozenset[int]:
    """The ranks of ``--debugpy``."""
    if typed is None:
        return frozenset()
    if not all(part.strip().isdecimal() for part in typed.split(",")):
        raise UsageError(f"--debugpy {shown(typed, 60)}: expected ranks", "--debugpy 0,3")
    from importlib.util import find_spec

    if find_spec("debugpy") is None:
        raise UsageError("--debugpy needs debugpy, which is not installed", "pip install debugpy")
    return frozenset(map(int, typed.split(",")))


def _oom_report(options: Options, plan: Plan) -> bool:
    """Whether ranks report CUDA's memory; where the program is to find no torch yet, it may still."""
    if options.oom_report and plan.target.kind is TargetKind.PROGRAM:
        raise UsageError("--oom-report works only with Python", "leave --oom-report out, or name a Python program")
    if options.oom_report and (built := cpu_build()):
        raise UsageError(
            f"--oom-report needs a torch for CUDA or ROCm; this is {built}, for CPUs alone", "leave --oom-report out"
        )
    return options.oom_report


def _has_person() -> bool:
    """Whether somebody at our terminal can type to a rank in its debugger."""
    return in_foreground(0) and (watched(1) or watched(2)) and can_draw() and not VOICE.for_machines


def _beside(options: Options, plan: Plan) -> tuple[tuple[Sidecar, ...], tuple[Command, ...]]:
    """The programs that run beside rank 0, and those that are told what happens."""
    if plan.node_rank or not options.has_programs:
        return (), ()
    from ddplaunch.cli import sidecars

    return sidecars.read(options), sidecars.read_notify(options)


def _metrics(path: str | None) -> str | None:
    """The file of ``--metrics``, which need not be there; its folder must be, and be ours to write into."""
    if path is None:
        return None
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise UsageError(f"--metrics {shown(path, 60)}: there is no folder {shown(folder, 60)}", f"mkdir -p {folder}")
    if os.path.isdir(path):
        raise UsageError(f"--metrics {shown(path, 60)} is a folder, not a file", f"--metrics {path}/job.prom")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            f"--metrics {shown(path, 60)}: you may not write into {shown(folder, 60)}", "name another folder"
        )
    return os.path.abspath(path)


def why_no_view(options: Options) -> str | None:
    """Why ``--ui`` shows nothing here, where it does not."""
    if not options.ui:
        return None
    if not (watched(1) or watched(2)):
        return "--ui shows nothing here: this is not a terminal"
    if not can_draw():
        return f"--ui shows nothing here: TERM={os.environ.get('TERM', '')} cannot move the cursor"
    return None
