"""Audits imports in each rank: whether they change what was preloaded for all."""

import datetime
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.preload_audit.audit import may_be_set
from tests.preload_audit.distributions import InstalledDistributions
from tests.preload_audit.known_table import Entry, KnownTable
from tests.preload_audit.probe_report import ProbeReport, diff_snapshots
from tests.preload_audit.probe_runner import ProbeFailed, ProbeRunner
from tests.preload_audit.recorder import SETS

_CHANGES = ("changes ", "moves ", "sets ", "handles ", "blocks ", "ignores ", "adds ")
_IGNORED_ATTRIBUTES = {
    (module, name)
    for module, names in {
        # Caches.
        "re": "_cache _cache2 RegexFlag",
        "linecache": "cache",
        "ctypes": "_pointer_type_cache _c_functype_cache",
        "_ctypes": "_pointer_type_cache",
        "platform": "_sys_version_cache",
        "sys": "path_importer_cache modules meta_path",  # process_state.py reports changes at the front of meta_path
        # Tables by module, by class or by name, to which each adds its own; sys.modules is one.
        "triton.language.extra": "modules",
        "typing": "_overload_registry",
        "copy": "dispatch_table",
        "copyreg": "dispatch_table",
        "pickle": "dispatch_table",
        "multiprocessing.reduction": "AbstractReducer ForkingPickler register",
        "multiprocess.reduction": "AbstractReducer ForkingPickler register",
        "cloudpickle.cloudpickle": "Pickler",
        "torch.distributed.checkpoint._state_dict_stager": "dispatch_table",
        "weakref": "finalize",
    }.items()
    for name in names.split()
}
"""Attributes that change with every import, or only in what the imported module adds."""

_CHILD_VARIABLES = frozenset({"LD_LIBRARY_PATH"})
"""Variables that the loader reads once, as a process begins: a change matters to child processes only."""

_DEFAULT_MODULES = ("numpy", "yaml", "tqdm", "requests")
"""Modules to preload where the table has none."""


@dataclass(frozen=True)
class _Changes:
    """Changes by an import.

    Attributes:
        sets: variables that may be set.
        reasons: all other changes, for which it is not harmless.
    """

    sets: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def audit_harmless(
    names: Sequence[str], installed: InstalledDistributions, runner: ProbeRunner, table: KnownTable
) -> dict[str, Entry]:
    """Print the reasons against each distribution; return the entries of those that have none."""
    preloaded = [
        module
        for name, each in table.packages.items()
        if "refused" not in each and name != "torch" and name in installed.versions
        for module in each.get("modules", ())
    ] or list(_DEFAULT_MODULES)
    found = dict(_find_changes(list(names), installed, runner, preloaded))
    for name, changes in found.items():
        for reason in changes.reasons:
            print(f"{name}: {reason}", file=sys.stderr)
    return {
        name: {
            "top": installed.top_modules[name],
            "versions": [installed.versions[name]],
            **({"sets": found[name].sets} if name in found else {}),
            "on": datetime.date.today().isoformat(),
        }
        for name in names
        if name not in found or not found[name].reasons
    }


def _find_changes(
    names: list[str], installed: InstalledDistributions, runner: ProbeRunner, preloaded: Sequence[str]
) -> Iterator[tuple[str, _Changes]]:
    """Yield the distributions that change something, by bisection: most do not, so one process imports all."""
    modules = [module for name in names for module in installed.top_modules[name]]
    try:
        changes = _list_changes(runner.run("harmless", preloaded, last=modules), modules)
    except ProbeFailed as error:
        changes = _Changes(reasons=[f"does not end: {error}"])
    if (changes.sets or changes.reasons) and len(names) > 1:
        half = len(names) // 2
        yield from _find_changes(names[:half], installed, runner, preloaded)
        yield from _find_changes(names[half:], installed, runner, preloaded)
    elif changes.sets or changes.reasons:
        yield names[0], changes


def _list_changes(report: ProbeReport, imported: Sequence[str]) -> _Changes:
    before, unchanged, after = report.snapshots
    ignored = _IGNORED_ATTRIBUTES.union(diff_snapshots(before, unchanged))
    changed = [each for each in diff_snapshots(unchanged, after) if each not in ignored]
    reasons, sets = [f"changes {module}.{name}" for module, name in changed], list[str]()
    for state in sorted((before.shared.keys() | after.shared.keys()) - {"sys.meta_path"}):
        if before.shared.get(state) == after.shared.get(state):
            continue
        if state[0] == "$" and (may_be_set(state[1:]) or state[1:] in _CHILD_VARIABLES):
            sets.append(state[1:])
        else:
            reasons.append(f"{'changes' if state in before.shared else 'sets'} {state}")
    allowed = {f"{SETS}{name}" for name in sets} | {f"changes the variable {name}" for name in sets}
    if before.shared["sys.path"] == after.shared["sys.path"]:
        allowed.add("changes sys.path")  # for its own modules (cv2)
    actions = [action for stack, action in report.actions if stack[0] in imported and action.startswith(_CHANGES)]
    return _Changes(sets, list(dict.fromkeys([*reasons, *(each for each in actions if each not in allowed)])))
