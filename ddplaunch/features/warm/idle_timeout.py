"""How long an idle warm zygote is kept: ``--warm``, or ``[run] warm`` of the user's own file.

A project's file cannot set it: which processes stay on a machine is the user's choice.
"""

from __future__ import annotations

import os
from typing import Any

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Options
from ddplaunch.base.safe_files import user_config_path
from ddplaunch.base.types import WEEK_S
from ddplaunch.cli.cluster_detection import OVER_SSH_VARIABLE
from ddplaunch.cli.config_defaults import USER_TABLE, read_user_table
from ddplaunch.core.option_values import parse_seconds
from ddplaunch.features.warm.options import Warming
from ddplaunch.system.clusters import find_marker

DEFAULT_IDLE_TIMEOUT_S = 600.0
"""How long ``--warm`` keeps an idle zygote by default."""


def read_idle_timeout(options: Options) -> tuple[float, str | None]:
    """Return how long an idle zygote is kept, 0 for not at all; and why not, if it was requested.

    Raises UsageError if the value in the file is not a time.
    """
    if options[Warming].warm is False:
        return 0.0, None
    seconds = _read_warm_from_file()
    if not seconds and not options[Warming].warm:
        return 0.0, None
    why = _why_not_warm(typed=bool(options[Warming].warm))
    return (0.0, why) if why else (seconds or DEFAULT_IDLE_TIMEOUT_S, None)


def _why_not_warm(*, typed: bool) -> str | None:
    if variable := find_marker(os.environ):
        return f"a scheduler started this run: {variable} is set"
    if OVER_SSH_VARIABLE in os.environ:
        return "this run was started over SSH"
    if os.getpid() == 1:
        return "the launcher has pid 1"
    if os.geteuid() == 0 and not typed:
        return "as root only --warm keeps a zygote"
    return None


def _read_warm_from_file() -> float | None:
    path = user_config_path(os.environ)
    if path is None or not os.path.isfile(path):
        return None
    table = read_user_table(path, USER_TABLE)
    for key in table:
        if key != "warm":
            raise UsageError(f"{path}: unknown key {key} in [{USER_TABLE}]", "known: warm")
    return _parse_warm_time(path, table["warm"]) if "warm" in table else None


def _parse_warm_time(path: str, value: Any) -> float:
    """Parse a time; 0 disables warm zygotes."""
    seconds = parse_seconds(str(value)) if isinstance(value, (str, int, float)) else None
    if seconds is None or not 0 <= seconds <= WEEK_S:
        shown = f'"{value}"' if isinstance(value, str) else value
        raise UsageError(f"{path}: [run] warm = {shown}: expected a time from 0 up to a week", 'warm = "10m"')
    return seconds
