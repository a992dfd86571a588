"""Whether a run keeps its zygote for the next ones, and for how long: ``--warm``, or ``[run] warm`` of the user's file.

That file alone counts: what stays on a machine is its user's choice, not a project's.
"""

from __future__ import annotations

import os

from ddplaunch import TYPE_CHECKING
from ddplaunch.errors import UsageError
from ddplaunch.files import users_config

if TYPE_CHECKING:
    from typing import Any

    from ddplaunch.cli.options import Options

KEPT = 600.0
"""Seconds for which ``--warm`` keeps a zygote, where the file does not say."""


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
    from ddplaunch import clusters
    from ddplaunch.cli import over_ssh

    if sign := clusters.sign(os.environ):
        return f"a scheduler started this run: {sign} is set"
    if over_ssh.STARTED in os.environ:
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
    from ddplaunch.cli.defaults import OWN, users_table

    table = users_table(path, OWN)
    for key in table:
        if key != "warm":
            raise UsageError(f"{path}: unknown key {key} in [{OWN}]", "known: warm")
    return _seconds(path, table["warm"]) if "warm" in table else None


def _seconds(path: str, value: Any) -> float:
    """Read a time; 0 keeps nothing."""
    from ddplaunch.cli.values import WEEK, as_seconds

    seconds = as_seconds(str(value)) if isinstance(value, (str, int, float)) else None
    if seconds is None or not 0 <= seconds <= WEEK:
        shown = f'"{value}"' if isinstance(value, str) else value
        raise UsageError(f"{path}: [run] warm = {shown}: expected a time from 0 up to a week", 'warm = "10m"')
    return seconds
