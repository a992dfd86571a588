"""Audits imports in each rank: whether they change what was preloaded for all."""

import datetime
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.preload_audit.audit import may_be_set
from tests.preload_audit.installed import Installed
from tests.preload_audit.known import Entry, Known
from tests.preload_audit.probe_report import ProbeReport, diff_snapshots
from tests.preload_audit.recorder import SETS
from tests.preload_audit.runs import Failed, Runs

_CHANGES = ("changes ", "moves ", "sets ", "handles ", "blocks ", "ignores ", "adds ")
_TABLES = {
    (module, name)
    for module, names in {
        # Caches.
        "re": "_cache _cache2 RegexFlag",
        "linecache": "cache",
        "ctypes": "_pointer_type_cache _c_functype_cache",
        "_ctypes": "_pointer_type_cache",
        "platform": "_sys_version_cache",
        "sys": "path_importer_cache modules meta_path",  # of a change at the front of meta_path, Surroundings tells
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
"""What changes with every import, or in nothing that another module has there."""

_OF_CHILDREN = frozenset({"LD_LIBRARY_PATH"})
"""Variables that the loader reads once, as a process begins: to set them matters to children."""

_COMMON = ("numpy", "yaml", "tqdm", "requests")


def audit(names: Sequence[str], installed: Installed, runs: Runs, known: Known) -> dict[str, Entry]:
    """Print what is held against each; return the entries of the others."""
    common = [
        module
        for name, each in known.packages.items()
        if "refused" not in each and name != "torch" and name in installed.versions
        for module in each.get("modules", ())
    ] or list(_COMMON)
    found = dict(_found(list(names), installed, runs, common))
    for name, changes in found.items():
        for reason in changes.reasons:
            print(f"{name}: {reason}", file=sys.stderr)
    return {
        name: {
            "top": installed.tops(name),
            "versions": [installed.versions[name]],
            **({"sets": found[name].sets} if name in found else {}),
            "on": datetime.date.today().isoformat(),
        }
        for name in names
        if name not in found or not found[name].reasons
    }


@dataclass(frozen=True)
class _Changes:
    """What an import changes: variables that may be set, and what may not be changed at all."""

    sets: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def _found(names: list[str], installed: Installed, runs: Runs, common: Sequence[str]) -> Iterator[tuple[str, _Changes]]:
    """Those that change something, and what. Most do not, so all are imported in one process; then halves of them."""
    tops = [top for name in names for top in installed.tops(name)]
    try:
        found = _changes(runs.run("harmless", common, last=tops), tops)
    except Failed as error:
        found = _Changes(reasons=[f"does not end: {error}"])
    if (found.sets or found.reasons) and len(names) > 1:
        half = len(names) // 2
        yield from _found(names[:half], installed, runs, common)
        yield from _found(names[half:], installed, runs, common)
    elif found.sets or found.reasons:
        yield names[0], found


def _changes(report: ProbeReport, imported: Sequence[str]) -> _Changes:
    before, unchanged, after = report.snapshots
    by_itself = set(diff_snapshots(before, unchanged))
    changed = [each for each in diff_snapshots(unchanged, after) if each not in by_itself | _TABLES]
    reasons, sets = [f"changes {module}.{name}" for module, name in changed], list[str]()
    for what in sorted((before.shared.keys() | after.shared.keys()) - {"sys.meta_path"}):
        if before.shared.get(what) == after.shared.get(what):
            continue
        if what[0] == "$" and (may_be_set(what[1:]) or what[1:] in _OF_CHILDREN):
            sets.append(what[1:])
        else:
            reasons.append(f"{'changes' if what in before.shared else 'sets'} {what}")
    passing = {f"{SETS}{name}" for name in sets} | {f"changes the variable {name}" for name in sets}
    if before.shared["sys.path"] == after.shared["sys.path"]:
        passing.add("changes sys.path")  # for its own modules (cv2)
    did = [what for stack, what in report.actions if stack[0] in imported and what.startswith(_CHANGES)]
    return _Changes(sets, list(dict.fromkeys([*reasons, *(what for what in did if what not in passing)])))
