"""A project's defaults for ``ddplaunch run``: ``[tool.ddplaunch.run]`` of the nearest pyproject.toml.

They go before what is detected, and behind what is typed and what variables say. Only options that say how ranks of
this machine run, stop and are shown: none that runs a command, reaches a host or names a run.
"""

from __future__ import annotations

import os

from ddplaunch import TYPE_CHECKING
from ddplaunch.cli.options import OPTIONS, Options, Source
from ddplaunch.cli.values import as_typed
from ddplaunch.dataclass import replace
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ddplaunch.cli.option import Option

# fmt: off
KEYS = frozenset({
    "pass-local-rank", "nproc", "gpus", "oversubscribe", "virtual-local-rank", "bind", "join-timeout",
    "heartbeat-timeout", "backend", "start", "check", "gpu-memory-timeout", "role", "grace", "max-restarts",
    "restart-on", "restart-backoff", "min-uptime", "timeout", "stall-timeout", "on-stall", "straggler-timeout",
    "preempt-signal", "preempt-grace", "preempt-forward", "show", "prefix", "log-dir", "no-history", "no-inspect",
})
# fmt: on
"""The options that a project may set."""


def applied(options: Options, cwd: str, environ: Mapping[str, str]) -> tuple[Options, tuple[str, ...]]:
    """Fill in what nobody has set; return it with notes on the files.

    Raises:
        UsageError: the file is not TOML, or has an unknown key or a value that the option does not take.
    """
    if options.no_config:
        return options, ()
    from ddplaunch.cli.defaults import read_run

    known = {option.opts[-1][2:]: option for option in OPTIONS if not option.is_argument}
    found = read_run({key: known[key] for key in KEYS}, known, cwd, environ)
    new: dict[str, Any] = {}
    used: list[str] = []
    for name, default in found.values.items():
        if options.sources[name] is Source.DEFAULT:
            option = next(each for each in OPTIONS if each.name == name)
            new[name] = _read(option, default.value, default.file)
            if name == "log_dir" and os.path.dirname(default.file) != cwd:  # beside the file that names it
                new[name] = os.path.join(os.path.dirname(default.file), new[name])
            used += as_typed(option, new[name])
    if not new:
        return options, found.notes
    sources = {**options.sources, **dict.fromkeys(new, Source.FILE)}
    file = next(iter(found.values.values())).file
    said = (f"defaults of {file}: {' '.join(used)}",) if used else ()
    return replace(options, **new, sources=sources), (*found.notes, *said)


def _read(option: Option, value: str | bool | tuple[str, ...], file: str) -> Any:
    place = f"{file}: [tool.ddplaunch.run] {option.opts[-1][2:]}"
    if option.choices and value not in option.choices:
        raise UsageError(f'{place} = "{value}": expected {" or ".join(option.choices)}')
    try:
        return option.read(option, value) if option.read else value
    except UsageError as error:
        _, _, expected = error.message.partition(": ")
        raise UsageError(f'{place} = "{value}": {expected or error.message}', error.hint) from None
