"""Audits what is imported in each rank: whether that changes anything in what was imported for all."""

import datetime
import json
import sys
from collections.abc import Iterator, Sequence

from tests.preloads.account import Account, differences
from tests.preloads.installed import Installed
from tests.preloads.known import Known
from tests.preloads.runs import Failed, Runs

_CHANGES = ("changes ", "moves ", "sets ", "handles ", "blocks ", "ignores ", "adds ")
_TABLES = {
    (module, name)
    for module, names in {
        # Caches.
        "re": "_cache _cache2 RegexFlag",
        "linecache": "cache",
        "platform": "_sys_version_cache",
        "sys": "path_importer_cache modules meta_path",  # of a change at the front of meta_path, Surroundings tells
        # Tables by module, by class or by name, to which each adds its own; sys.modules is one.
        "triton.language.extra": "modules",
        "typing": "_overload_registry",
        "copy": "dispatch_table",
        "copyreg": "dispatch_table",
        "pickle": "dispatch_table",
        "multiprocessing.reduction": "AbstractReducer ForkingPickler register",
    }.items()
    for name in names.split()
}
"""What changes with every import, or in nothing that another module has there."""

_COMMON = ("numpy", "yaml", "tqdm", "requests")


def audit(names: Sequence[str], installed: Installed, runs: Runs, known: Known, *, write: bool) -> int:
    """Print the entry of each, or why there is none; return 1 if there is a reason."""
    common = [
        module
        for name, each in known.packages.items()
        if "refused" not in each and name != "torch" and name in installed.versions
        for module in each.get("modules", ())
    ] or list(_COMMON)
    refused = dict(_refused(list(names), installed, runs, common))
    today = datetime.date.today().isoformat()
    for name in names:
        known.harmless.pop(name, None)
        for reason in refused.get(name, ()):
            print(f"{name}: {reason}", file=sys.stderr)
        if name not in refused:
            known.harmless[name] = {
                "top": installed.tops(name),
                "versions": [installed.versions[name]],
                "on": today,
            }
            print(json.dumps({name: known.harmless[name]}, indent=2), flush=True)
    if write:
        known.write()
    return 1 if refused else 0


def _refused(
    names: list[str], installed: Installed, runs: Runs, common: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    """Those that change something, and what. Most do not, so all are imported in one process; then halves of them."""
    tops = [top for name in names for top in installed.tops(name)]
    try:
        reasons = _changes(runs.run("harmless", common, last=tops), tops)
    except Failed as error:
        reasons = [f"does not end: {error}"]
    if reasons and len(names) > 1:
        half = len(names) // 2
        yield from _refused(names[:half], installed, runs, common)
        yield from _refused(names[half:], installed, runs, common)
    elif reasons:
        yield names[0], reasons


def _changes(account: Account, imported: Sequence[str]) -> list[str]:
    before, unchanged, after = account.dumps
    by_itself = set(differences(before, unchanged))
    changed = [each for each in differences(unchanged, after) if each not in by_itself | _TABLES]
    reasons = [f"changes {module}.{name}" for module, name in changed]
    for what in sorted((before.shared.keys() | after.shared.keys()) - {"sys.meta_path"}):
        if what not in before.shared:
            reasons.append(f"sets {what}")
        elif before.shared[what] != after.shared.get(what):
            reasons.append(f"changes {what}")
    reasons += [f"{what}" for stack, what in account.found if stack[0] in imported and what.startswith(_CHANGES)]
    return list(dict.fromkeys(reasons))
