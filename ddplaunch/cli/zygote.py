"""What the zygote imports for all ranks, and for how long it stays for the next runs.

The latter says ``--warm``, or ``[run] warm`` of the user's own file. That file alone counts: what stays on a machine is
its user's choice, not a project's.
"""

from __future__ import annotations

import os
import sys

from ddplaunch import TYPE_CHECKING
from ddplaunch.cli.defaults import OWN, users_table
from ddplaunch.cli.options import Options
from ddplaunch.cli.surroundings import OVER_SSH
from ddplaunch.cli.values import WEEK, as_seconds
from ddplaunch.clusters import sign
from ddplaunch.errors import UsageError
from ddplaunch.files import users_config
from ddplaunch.plan.plan import Plan
from ddplaunch.preload.choice import AUTO, Choice, choose

if TYPE_CHECKING:
    from typing import Any

KEPT = 600.0
"""Seconds for which ``--warm`` keeps a zygote, where the file does not say."""


def choose_preload(options: Options, plan: Plan) -> Choice:
    """Choose what the zygote imports; a node with one rank and no restarts has one only where that alone is quicker."""
    if options.start == "exec" or (options.start == "auto" and sys.platform != "linux"):
        return Choice()
    preload = options.preload or AUTO
    unasked = options.start == "auto" and preload == AUTO
    lone = unasked and len(plan.local_ranks) == 1 and not options.max_restarts
    own = plan.environment(plan.local_ranks[0])
    return choose(plan.target, preload, {**os.environ, **plan.shared}, own, lone=lone)


def read_warmth(options: Options) -> tuple[float | None, str | None]:
    """Return for how many seconds an idle zygote is kept, None for not at all, and why not where that was asked for.

    Raises:
        UsageError: the file says something else than a time.
    """
    if options.warm is False:
        return None, None
    seconds = _in_file()
    if not seconds and not options.warm:
        return None, None
    why = _why_not(typed=bool(options.warm))
    return (None, why) if why else (seconds or KEPT, None)


def _why_not(*, typed: bool) -> str | None:
    if variable := sign(os.environ):
        return f"a scheduler started this run: {variable} is set"
    if OVER_SSH in os.environ:
        return "this run was started over SSH"
    if os.getpid() == 1:
        return "the launcher has pid 1"
    if os.geteuid() == 0 and not typed:
        return "root keeps none without --warm"
    return None


def _in_file() -> float | None:
    path = users_config(os.environ)
    if path is None or not os.path.isfile(path):
        return None
    table = users_table(path, OWN)
    for key in table:
        if key != "warm":
            raise UsageError(f"{path}: unknown key {key} in [{OWN}]", "known: warm")
    return _seconds(path, table["warm"]) if "warm" in table else None


def _seconds(path: str, value: Any) -> float:
    """Read a time; 0 keeps nothing."""
    seconds = as_seconds(str(value)) if isinstance(value, (str, int, float)) else None
    if seconds is None or not 0 <= seconds <= WEEK:
        shown = f'"{value}"' if isinstance(value, str) else value
        raise UsageError(f"{path}: [run] warm = {shown}: expected a time from 0 up to a week", 'warm = "10m"')
    return seconds
