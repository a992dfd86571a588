"""Audits what is imported in each rank: whether that changes anything in what was imported for all."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence

from tests.preloads.account import Account, differences
from tests.preloads.installed import Installed
from tests.preloads.known import Known
from tests.preloads.runs import Failed, Runs

_CHANGES = ("changes ", "moves ", "sets ", "handles ", "blocks ", "ignores ", "adds ")
_TABLES = frozenset(
    {
        # Caches.
        ("re", "_cache"),
        ("re", "_cache2"),
        ("re", "RegexFlag"),
        ("linecache", "cache"),
        ("platform", "_sys_version_cache"),
        ("sys", "path_importer_cache"),
        # Tables by module, by class or by name, to which each adds its own.
        ("sys", "modules"),
        ("sys", "meta_path"),  # of a change at its front, Surroundings tells
        ("typing", "_overload_registry"),
        ("copy", "dispatch_table"),
        ("copyreg", "dispatch_table"),
        ("pickle", "dispatch_table"),
        ("multiprocessing.reduction", "AbstractReducer"),
        ("multiprocessing.reduction", "ForkingPickler"),
        ("multiprocessing.reduction", "register"),
    }
)
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
    code = 0
    for name in names:
        try:
            tops = installed.tops(name)
            reasons = _changes(runs.run("harmless", common, last=tops), tops)
        except Failed as error:
            reasons = [f"does not end: {error}"]
        for reason in reasons:
            print(f"{name}: {reason}", file=sys.stderr)
        if reasons:
            code = 1
            known.harmless.pop(name, None)
            continue
        today = datetime.date.today().isoformat()
        made = {"top": installed.tops(name), "versions": [installed.versions[name]], "on": today}
        print(json.dumps({name: made}, indent=2), flush=True)
        known.harmless[name] = made
    if write:
        known.write()
    return code


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
