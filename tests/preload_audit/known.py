"""The table ``ddplaunch/features/preload/known.json`` as the audit writes it."""

import datetime
import json
import platform
from pathlib import Path
from typing import Any

from tests.preload_audit.audit import Finding
from tests.preload_audit.installed import Installed
from tests.preload_audit.runs import HOME

FILE = HOME / "ddplaunch" / "features" / "preload" / "known.json"

Entry = dict[str, Any]

NAMED = {"minds torch's settings": "torch's settings", "minds logging": "logging", "logs at import": "logging"}
"""What a program cannot change without a word for it in its source (``ddplaunch.features.preload.import_selector``)."""

_LISTS = ("variables", "sets", "tries", "seeks", "loads", "generators")


class Known:
    def __init__(self, file: Path = FILE) -> None:
        self._file = file
        self.packages: dict[str, Entry] = {}
        self.harmless: dict[str, Entry] = {}
        if file.exists():
            found = json.loads(file.read_text(encoding="utf-8"))
            self.packages, self.harmless = found["packages"], found["harmless"]

    def modules(self, name: str, tops: list[str]) -> list[str]:
        """What of a distribution is to be audited: what its entry lists, or all at the top."""
        return list(self.packages.get(name, {}).get("modules", {})) or tops

    def write(self) -> None:
        """Replace the file: a line for each entry's field, sorted by name."""
        tables = []
        for name, table in (("packages", self.packages), ("harmless", self.harmless)):
            entries = [f"{json.dumps(key)}: {_render(table[key])}" for key in sorted(table)]
            tables.append(f"{json.dumps(name)}: {{\n" + ",\n".join(entries) + "\n}")
        fresh = self._file.with_suffix(".new")
        fresh.write_text("{" + ",\n".join(tables) + "}\n", encoding="utf-8")
        fresh.replace(self._file)


def _render(entry: Entry) -> str:
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items()) + "}"


def make_entry(finding: Finding, known: Entry, installed: Installed, modules: list[str]) -> Entry:
    """Make the entry of what was found; what is written by hand is taken from the one that is ``known``.

    The audited version replaces that of the same major version. Where others stay, what they have shown stays too.
    """
    version, tops = installed.versions[finding.name], installed.tops(finding.name)
    others = [each for each in known.get("versions", ()) if each.partition(".")[0] != version.partition(".")[0]]
    made: Entry = {"top": tops, "versions": [*others, version]}
    listed = known.get("modules", {})
    if finding.guilty:
        module, reasons = next(iter(finding.guilty.items()))
        made["refused"] = reasons[0] if module.partition(".")[0] in tops else f"imports {module}, which {reasons[0]}"
    else:
        minds = {next((each for each in NAMED if f" {each}" in reason), reason) for reason in finding.bound_by}
        free = minds <= set(NAMED) and not (others and known.get("order") == "bound")
        made["modules"] = {each: listed.get(each, []) for each in modules}
        made["order"] = "free" if free else "bound"
        if free:
            made["minds"] = sorted({NAMED[each] for each in minds})
        else:
            found = (each for each in finding.bound_by if each in minds and each not in NAMED)
            made["bound_by"] = next(found, None) or known["bound_by"]
        made |= {key: list(getattr(finding, key)) for key in _LISTS}
        if others:
            joined = (*_LISTS, "minds") if free else _LISTS
            made |= {key: sorted({*made[key], *known.get(key, ())}) for key in joined}
            made["modules"] = {**listed, **made["modules"]}
    made |= {key: known[key] for key in ("companions", "settings") if key in known}
    if finding.guilty and listed:
        made["modules"] = listed
    made = {key: value for key, value in made.items() if value or key == "order"}
    with_ = f"Python {platform.python_version()}, torch {installed.versions.get('torch', '?')}"
    return {**made, "on": datetime.date.today().isoformat(), "with": with_}
