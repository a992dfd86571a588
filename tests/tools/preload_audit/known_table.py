"""The table of known packages, ``ddplaunch/features/preload/known.json``, as the audit writes it."""

import json
from pathlib import Path
from typing import Any

from tests.tools.preload_audit.audit import AuditResult
from tests.tools.preload_audit.distributions import InstalledDistributions
from tests.tools.preload_audit.probe_runner import REPOSITORY

TABLE_PATH = REPOSITORY / "ddplaunch" / "features" / "preload" / "known.json"

Entry = dict[str, Any]

_LISTS = ("loads", "tries")


class KnownTable:
    """The content of the table's file, which need not exist."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.packages: dict[str, Entry] = {}
        if path.exists():
            self.packages = json.loads(path.read_text(encoding="utf-8"))

    def write(self) -> None:
        """Replace the file: a line for each entry's field, sorted by name."""
        entries = [f"{json.dumps(key)}: {_render_entry(self.packages[key])}" for key in sorted(self.packages)]
        new = self._path.with_suffix(".new")
        new.write_text("{\n" + ",\n".join(entries) + "}\n", encoding="utf-8")
        new.replace(self._path)


def _render_entry(entry: Entry) -> str:
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items()) + "}"


def make_entry(result: AuditResult, former: Entry, installed: InstalledDistributions, modules: list[str]) -> Entry:
    """Make the entry of a distribution, with what is written by hand in its ``former`` entry.

    The audited version replaces that of the same major version. If others remain, so do their results.
    """
    version, top_modules = installed.versions[result.name], installed.top_modules[result.name]
    others = [each for each in former.get("versions", ()) if each.partition(".")[0] != version.partition(".")[0]]
    entry: Entry = {"top": top_modules, "versions": [*others, version]}
    listed = former.get("modules", {})
    if result.violations:
        module, reasons = next(iter(result.violations.items()))
        is_own = module.partition(".")[0] in top_modules
        entry["refused"] = reasons[0] if is_own else f"imports {module}, which {reasons[0]}"
    else:
        entry["modules"] = {each: listed.get(each, []) for each in modules}
        entry |= {key: list(getattr(result, key)) for key in _LISTS}
        if others:
            entry |= {key: sorted({*entry[key], *former.get(key, ())}) for key in _LISTS}
            entry["modules"] = {**listed, **entry["modules"]}
    if result.violations and listed:
        entry["modules"] = listed
    return {key: value for key, value in entry.items() if value}
