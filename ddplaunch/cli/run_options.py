"""The options of ``ddplaunch run``: the groups of the core and of all features, and the headings of the help."""

from __future__ import annotations

from collections.abc import Iterable

from ddplaunch.base.options import OptionGroup, declared_options
from ddplaunch.core import options as core
from ddplaunch.core.feature_registry import load_features

# fmt: off
CORE_GROUPS: tuple[type[OptionGroup], ...] = (
    core.TargetOptions, core.RanksPerNode, core.Nodes, core.Connections, core.Elastic, core.Starting, core.Role,
    core.Stopping, core.TimeLimit, core.Preemption, core.Output, core.Logging, core.Inspecting,
    core.DryRun,
)
# fmt: on


def arrange_groups(own: Iterable[type[OptionGroup]], added: Iterable[type[OptionGroup]]) -> list[type[OptionGroup]]:
    """Insert each added group after the option in its ``after``, else last under its heading, else before the last."""
    groups, left = list(own), list(added)
    while left:
        names = {name: place for place, kind in enumerate(groups) for name in kind.__struct_fields__}
        kind = next((each for each in left if each.after in names), left[0])
        under = [place for place, each in enumerate(groups) if each.heading == kind.heading]
        groups.insert(names.get(kind.after, max(under, default=len(groups) - 2)) + 1, kind)
        left.remove(kind)
    return groups


def _feature_groups() -> list[type[OptionGroup]]:
    """Return the option groups of all features; a plug-in with an invalid or duplicate option is left out."""
    registry, taken = load_features(), _spellings(CORE_GROUPS)
    groups: list[type[OptionGroup]] = []
    for name, feature in registry:
        try:
            own = _spellings(feature.options)
            if name in registry.plugins and taken & own:
                raise ValueError(f"there is an option {min(taken & own)}")
        except Exception as error:
            if name not in registry.plugins:
                raise
            registry.leave_out(name, error)
        else:
            groups += feature.options
            taken |= own
    return groups


def _spellings(groups: Iterable[type[OptionGroup]]) -> set[str]:
    return {text for kind in groups for option in declared_options(kind) for text in (*option.opts, option.name)}


GROUPS = tuple(arrange_groups(CORE_GROUPS, _feature_groups()))
"""All groups, in the order of the help."""

OPTIONS = tuple(option for kind in GROUPS for option in declared_options(kind))
"""The options and arguments, in order."""

PARAMS = [option.to_click() for option in OPTIONS]
"""The same as options and arguments of click: also those of ``submit`` and ``manifest``."""

_HELP = ("--help", "--help-all")  # they are click's

COMMON_OPTIONS = (*(option.opts[-1] for option in OPTIONS if option.is_common), *_HELP)
"""The options in ``--help``."""


def _make_help_sections() -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    for kind in GROUPS:
        names = [option.opts[-1] for option in declared_options(kind) if not option.is_argument]
        sections.setdefault(kind.heading, []).extend(names)
    sections[core.DryRun.heading].extend(_HELP)
    return sections


SECTIONS = _make_help_sections()
"""The headings of ``--help-all`` and the options under each."""
