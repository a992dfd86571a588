"""``python -m tests.tools.preload_audit NAME…``: audits installed distributions, with the interpreter that has them.

All of them are imported by the same interpreters, so that many take little longer than one.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from ddplaunch.base.text import normalize_name
from tests.tools.preload_audit.audit import Audit, AuditResult
from tests.tools.preload_audit.distributions import InstalledDistributions
from tests.tools.preload_audit.known_table import TABLE_PATH, Entry, KnownTable, make_entry
from tests.tools.preload_audit.probe_runner import ProbeFailed, ProbeRunner


def main() -> int:
    """Audit, print and perhaps write the entries; 1 if any of the distributions is refused."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.preload_audit", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="+", help="a distribution")
    parser.add_argument("--write", action="store_true", help="write the entries into the table")
    parser.add_argument(
        "--together", action="store_true", help="faster: change all settings at once, and do not tell which counts"
    )
    parser.add_argument("--table", type=Path, default=TABLE_PATH, help="another table")
    args = parser.parse_args()
    table = KnownTable(args.table)
    installed = InstalledDistributions()
    names = [normalize_name(each) for each in args.names]
    if absent := [each for each in names if each not in installed.versions]:
        print(f"not installed: {', '.join(absent)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        runner = ProbeRunner(Path(folder))
        entries = _audit(names, installed, runner, table, together=args.together)
        table.packages |= entries
        refused = any("refused" in each for each in entries.values())
    print(json.dumps(entries, indent=2))
    if args.write:
        table.write()
    return int(refused)


def _audit(
    names: list[str], installed: InstalledDistributions, runner: ProbeRunner, table: KnownTable, *, together: bool
) -> dict[str, Entry]:
    """Print the reasons against each distribution, and return its entry."""
    modules: dict[str, list[str]] = {}
    for name in names:
        listed = list(table.packages.get(name, {}).get("modules", {})) or installed.top_modules[name]
        modules[name] = [each for each in listed if installed.has_module(each)]
    try:
        results = Audit(installed, runner, modules, together=together).run()
    except ProbeFailed as error:
        results = [AuditResult(name, {listed[0]: [f"does not end: {error}"]}) for name, listed in modules.items()]
    for result in results:
        for module, reasons in result.violations.items():
            for reason in reasons:
                print(f"{result.name}: {module} {reason}", file=sys.stderr)
    return {
        each.name: make_entry(each, table.packages.get(each.name, {}), installed, modules[each.name])
        for each in results
    }


if __name__ == "__main__":
    sys.exit(main())
