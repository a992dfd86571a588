"""The table ``ddplaunch/features/preload/known.json`` as the audit writes it."""

import datetime
import json
import platform
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.preload_audit.audit import Finding
from tests.preload_audit.runs import HOME

FILE = HOME / "ddplaunch" / "features" / "preload" / "known.json"

Entry = dict[str, Any]

NAMED = {"minds torch's settings": "torch's settings", "minds logging": "logging", "logs at import": "logging"}
"""What a program cannot change without a word for it in its source (``ddplaunch.features.preload.import_selector``)."""


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
            entries = [f"{json.dumps(key)}: {_entry(table[key])}" for key in sorted(table)]
            tables.append(f"{json.dumps(name)}: {{\n" + ",\n".join(entries) + "\n}")
        fresh = self._file.with_suffix(".new")
        fresh.write_text("{" + ",\n".join(tables) + "}\n", encoding="utf-8")
        fresh.replace(self._file)


def _entry(entry: Entry) -> str:
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items()) + "}"


def entry(finding: Finding, known: Entry, tops: list[str], modules: list[str], version: str, torch: str) -> Entry:
    """The entry of what was found; what is written by hand is taken from the one that is ``known``."""
    made: Entry = {"top": tops, "versions": _versions(known, version)}
    if finding.guilty:
        module, reasons = next(iter(finding.guilty.items()))
        reason = reasons[0]
        made["refused"] = reason if module.partition(".")[0] in tops else f"imports {module}, which {reason}"
    else:
        listed = known.get("modules", {})
        made["modules"] = {each: listed.get(each, []) for each in modules}
        minds = {next((each for each in NAMED if f" {each}" in reason), reason) for reason in finding.bound_by}
        made["order"] = "free" if minds <= set(NAMED) else "bound"
        if made["order"] == "free":
            made["minds"] = sorted({NAMED[each] for each in minds})
        else:
            made["bound_by"] = next(each for each in finding.bound_by if each in minds)
        made |= {
            **asdict(finding.look),
            "loads": list(finding.loads),
            "generators": list(finding.generators),
        }
    made |= {key: known[key] for key in ("companions", "settings") if key in known}
    if finding.guilty and "modules" in known:
        made["modules"] = known["modules"]
    return {key: value for key, value in made.items() if value or key == "order"} | _when(torch)


def joined(found: Entry, known: Entry, version: str) -> Entry:
    """The entry of what was found with another version, or another build of torch, beside what is ``known``.

    What either has found holds for both; a major version that is refused is left out.
    """
    if "refused" in found and _majors([version]).keys().isdisjoint(_majors(known["versions"])):
        return known
    if "refused" in found or "refused" in known:
        return found if "refused" in found else known
    made = dict(known)
    if known["order"] == "free":
        made |= {key: found[key] for key in ("order", "bound_by") if key in found}
    made["top"] = sorted({*known["top"], *found["top"]})
    made["versions"] = [each for _, each in sorted(_majors([*known["versions"], version]).items())]
    for key in ("minds", "variables", "sets", "loads", "generators", "tries", "seeks"):
        if both := sorted({*known.get(key, ()), *found.get(key, ())}):
            made[key] = both
    if made["order"] == "bound":
        made.pop("minds", None)
    made["on"], made["with"] = found["on"], "; ".join(dict.fromkeys([*known["with"].split("; "), found["with"]]))
    return made


def _majors(versions: list[str]) -> dict[int, str]:
    """The first of the versions of each major one."""
    numbers = {each: [int(part) for part in re.findall(r"\d+", each)] for each in versions}
    return {numbers[each][0]: each for each in sorted(versions, key=numbers.__getitem__, reverse=True)}


def _versions(known: Entry, version: str) -> list[str]:
    """The version that was audited, and those of other major versions that were before."""
    others = [each for each in known.get("versions", ()) if each.partition(".")[0] != version.partition(".")[0]]
    return [*others, version]


def _when(torch: str) -> Entry:
    return {"on": datetime.date.today().isoformat(), "with": f"Python {platform.python_version()}, torch {torch}"}
