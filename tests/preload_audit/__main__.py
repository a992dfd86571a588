"""``python -m tests.preload_audit NAME…``: audits installed distributions, with the interpreter that has them."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from ddplaunch.base.text import normalize_name
from tests.preload_audit import harmless
from tests.preload_audit.audit import Audit, Finding
from tests.preload_audit.installed import Installed
from tests.preload_audit.known import FILE, Known, entry, joined
from tests.preload_audit.runs import Failed, Runs


def main() -> int:
    """Do what was asked for; 1 if any of it is refused."""
    parser = argparse.ArgumentParser(prog="python -m tests.preload_audit", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help="a distribution")
    parser.add_argument("--write", action="store_true", help="put what was found into the table")
    parser.add_argument("--join", action="store_true", help="with --write: beside what other versions have shown")
    parser.add_argument("--together", action="store_true", help="audit all in the same interpreters: quick")
    parser.add_argument("--harmless", action="store_true", help="audit for the list of those that change no others")
    parser.add_argument("--table", type=Path, default=FILE, help="another table")
    parser.add_argument("--reasons", type=int, default=3, metavar="N", help="how many of a module's to show")
    typed = parser.parse_args()
    known = Known(typed.table)
    installed = Installed()
    names = [normalize_name(each) for each in typed.names]
    if absent := [each for each in names if each not in installed.versions]:
        print(f"not installed: {', '.join(absent)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="audit-") as scratch:
        runs = Runs(Path(scratch))
        if typed.harmless:
            return harmless.audit(names, installed, runs, known, write=typed.write)
        groups = [names] if typed.together else [[each] for each in names]
        refused = [_audit(group, installed, runs, known, typed) for group in groups]
    return 1 if any(refused) else 0


def _audit(names: list[str], installed: Installed, runs: Runs, known: Known, typed: argparse.Namespace) -> bool:
    """Audit some, print and keep what was found; return whether any is refused."""
    asked = {
        name: [each for each in known.modules(name, installed.tops(name)) if installed.has(each)] for name in names
    }
    try:
        found = Audit(installed, runs, asked).run()
    except Failed as error:
        found = [Finding(name, {modules[0]: [f"does not end: {error}"]}, {}) for name, modules in asked.items()]
    torch = installed.versions.get("torch", "?")
    made = {}
    for each in found:
        there = known.packages.get(each.name, {})
        version = installed.versions[each.name]
        made[each.name] = entry(each, there, installed.tops(each.name), asked[each.name], version, torch)
        if typed.join and "versions" in there:
            made[each.name] = joined(made[each.name], there, version)
        _explain(each, typed.reasons)
    print(json.dumps(made, indent=2), flush=True)
    if typed.write:
        known.packages.update(made)
        known.write()
    return any("refused" in each for each in made.values())


def _explain(found: Finding, most: int) -> None:
    for module, reasons in found.guilty.items():
        for reason in reasons[:most]:
            print(f"{found.name}: {module} {reason}", file=sys.stderr)
        if len(reasons) > most:
            print(f"{found.name}: {module} … and {len(reasons) - most} more", file=sys.stderr)
    if found.guilty and len(found.by_module) > 1:
        for module, guilty in found.by_module.items():
            print(f"{found.name}: {module} leads to {', '.join(guilty) or 'none of them'}", file=sys.stderr)
    for reason in found.bound_by:
        print(f"{found.name}: bound, as {reason}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
