"""The table of known packages, ``ddplaunch/features/preload/known.json``, as the audit writes it."""

import datetime
import json
import platform
from pathlib import Path
from typing import Any

from tests.preload_audit.audit import AuditResult
from tests.preload_audit.distributions import InstalledDistributions
from tests.preload_audit.probe_runner import REPOSITORY

TABLE_PATH = REPOSITORY / "ddplaunch" / "features" / "preload" / "known.json"

Entry = dict[str, Any]

NAMED_REASONS = {"minds torch's settings": "torch's settings", "minds logging": "logging", "logs at import": "logging"}
"""Reasons for an order that need a word in the program's source (``ddplaunch.features.preload.import_selector``)."""

_LISTS = ("variables", "sets", "tries", "seeks", "loads", "generators")


class KnownTable:
    """The content of the table's file, which need not exist."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.packages: dict[str, Entry] = {}
        self.harmless: dict[str, Entry] = {}
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            self.packages, self.harmless = content["packages"], content["harmless"]

    def write(self) -> None:
        """Replace the file: a line for each entry's field, sorted by name."""
        tables = []
        for name, table in (("packages", self.packages), ("harmless", self.harmless)):
            entries = [f"{json.dumps(key)}: {_render_entry(table[key])}" for key in sorted(table)]
            tables.append(f"{json.dumps(name)}: {{\n" + ",\n".join(entries) + "\n}")
        new = self._path.with_suffix(".new")
        new.write_text("{" + ",\n".join(tables) + "}\n", encoding="utf-8")
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
        minds = {next((each for each in NAMED_REASONS if f" {each}" in reason), reason) for reason in result.bound_by}
        is_free = minds <= set(NAMED_REASONS) and not (others and former.get("order") == "bound")
        entry["modules"] = {each: listed.get(each, []) for each in modules}
        entry["order"] = "free" if is_free else "bound"
        if is_free:
            entry["minds"] = sorted({NAMED_REASONS[each] for each in minds})
        else:
            reasons_to_come_first = (each for each in result.bound_by if each in minds)
            entry["bound_by"] = next(reasons_to_come_first, None) or former["bound_by"]
        entry |= {key: list(getattr(result, key)) for key in _LISTS}
        if others:
            merged = (*_LISTS, "minds") if is_free else _LISTS
            entry |= {key: sorted({*entry[key], *former.get(key, ())}) for key in merged}
            entry["modules"] = {**listed, **entry["modules"]}
    entry |= {key: former[key] for key in ("companions", "settings") if key in former}
    if result.violations and listed:
        entry["modules"] = listed
    entry = {key: value for key, value in entry.items() if value or key == "order"}
    audited_with = f"Python {platform.python_version()}, torch {installed.versions.get('torch', '?')}"
    return {**entry, "on": datetime.date.today().isoformat(), "with": audited_with}
