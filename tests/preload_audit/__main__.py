"""``python -m tests.preload_audit NAME…``: audits installed distributions, with the interpreter that has them.

All of them are imported by the same interpreters, so that many take little longer than one.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from ddplaunch.base.text import normalize_name
from tests.preload_audit import harmless
from tests.preload_audit.audit import Audit, Finding
from tests.preload_audit.installed import Installed
from tests.preload_audit.known import FILE, Known, make_entry
from tests.preload_audit.runs import Failed, Runs


def main() -> int:
    """Audit, print and perhaps write the entries; 1 if any of the distributions is refused."""
    parser = argparse.ArgumentParser(prog="python -m tests.preload_audit", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="+", help="a distribution")
    parser.add_argument("--write", action="store_true", help="put what was found into the table")
    parser.add_argument("--harmless", action="store_true", help="audit for the list of those that change no others")
    parser.add_argument("--table", type=Path, default=FILE, help="another table")
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
            made = harmless.audit(names, installed, runs, known)
            known.harmless = {name: each for name, each in known.harmless.items() if name not in names} | made
            refused = len(made) < len(names)
        else:
            made = _audit(names, installed, runs, known)
            known.packages |= made
            refused = any("refused" in each for each in made.values())
    print(json.dumps(made, indent=2))
    if typed.write:
        known.write()
    return int(refused)


def _audit(names: list[str], installed: Installed, runs: Runs, known: Known) -> dict[str, dict[str, object]]:
    """Print what is held against each; return its entry."""
    asked = {
        name: [each for each in known.modules(name, installed.tops(name)) if installed.has(each)] for name in names
    }
    try:
        found = Audit(installed, runs, asked).run()
    except Failed as error:
        found = [Finding(name, {modules[0]: [f"does not end: {error}"]}) for name, modules in asked.items()]
    for each in found:
        for module, reasons in each.guilty.items():
            for reason in reasons:
                print(f"{each.name}: {module} {reason}", file=sys.stderr)
        for reason in each.bound_by:
            print(f"{each.name}: bound, as {reason}", file=sys.stderr)
    return {
        each.name: make_entry(each, known.packages.get(each.name, {}), installed, asked[each.name]) for each in found
    }


if __name__ == "__main__":
    sys.exit(main())
