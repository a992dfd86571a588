"""Environment variables that set options of ``run``, like DDPLAUNCH_NPROC=2: lists them, and reports unknown ones."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from ddplaunch.base.options import VARIABLE_PREFIX
from ddplaunch.base.text import closest_match
from ddplaunch.cli.cluster_detection import IN_RANK_VARIABLE, OVER_SSH_VARIABLE
from ddplaunch.cli.run_options import OPTIONS

OPTION_VARIABLES = frozenset(option.variable for option in OPTIONS if option.variable)
"""The variables that set options. No rank has them: they are meant for this command."""

_ONLY_OPTIONS = frozenset(option.variable for option in OPTIONS if option.variable and not option.envvar)

# fmt: off
_OTHERS = frozenset({
    # of ranks and programs
    "DDPLAUNCH_DEVICE", "DDPLAUNCH_PREEMPTED_FILE", "DDPLAUNCH_TERMINAL", "DDPLAUNCH_PROGRAM",
    # of batch jobs and hosts
    "DDPLAUNCH_NNODES", "DDPLAUNCH_NODE_RANK", "DDPLAUNCH_HOSTS", "DDPLAUNCH_CODE", "DDPLAUNCH_OVER_SSH",
    "DDPLAUNCH_FIRST_NODE",
    # of batch scripts
    "DDPLAUNCH_EXIT_FILE", "DDPLAUNCH_REQUEUE_FILE", "DDPLAUNCH_LOCAL_JOB", "DDPLAUNCH_START_FILE",
    "DDPLAUNCH_ARRAY_INDEX",
    # of the launcher
    "DDPLAUNCH_PLUGINS", "DDPLAUNCH_TMPDIR", "DDPLAUNCH_LOCK_DIR",
})
# fmt: on
_OF_PROGRAMS = ("_ADDRESS", "_ADDRESSES")
_OF_TESTS = f"{VARIABLE_PREFIX}TEST"


def drop_option_variables(environ: MutableMapping[str, str]) -> None:
    """In a launcher that was started over SSH, remove variables that set options: its command line has all options."""
    if environ.get(OVER_SSH_VARIABLE):
        for name in (_ONLY_OPTIONS - {f"{VARIABLE_PREFIX}DOMAIN"}) & environ.keys():  # each host has its own domain
            del environ[name]


def _find_similar_variable(name: str) -> str | None:
    known = [each.removeprefix(VARIABLE_PREFIX) for each in OPTION_VARIABLES]
    near = closest_match(name.removeprefix(VARIABLE_PREFIX), known)
    return near and VARIABLE_PREFIX + near


def unknown_variable_notes(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return notes on DDPLAUNCH_* variables that set no known option."""
    names = [name for name in environ if name.startswith(VARIABLE_PREFIX)]
    if not names or IN_RANK_VARIABLE in environ:
        return ()
    unknown = sorted({*names} - OPTION_VARIABLES - _OTHERS)
    return tuple(
        f"{name} has no effect: " + (f"did you mean {near}?" if near else "there is no such option")
        for name in unknown
        if not name.endswith(_OF_PROGRAMS) and not name.startswith(_OF_TESTS)
        for near in [_find_similar_variable(name)]
    )
