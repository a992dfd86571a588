"""Finds the words of a program that lead to the modules of a lazy package."""

import importlib
import json
from collections.abc import Mapping, Sequence

from tests.preload_audit.known import Known


def show(names: Sequence[str], known: Known) -> int:
    """Print, for each module that an entry lists, the names that lead there."""
    for name in names:
        listed = known.packages.get(name, {}).get("modules", {})
        found = {}
        for top in {each.partition(".")[0] for each in listed}:
            leads = _structure(top)
            found.update({module: sorted(leads.get(module, ())) for module in listed if module.startswith(f"{top}.")})
        print(json.dumps({name: found}, indent=2))
    return 0


def _structure(top: str) -> Mapping[str, set[str]]:
    """The names by module, as the lazy module keeps them (transformers, diffusers)."""
    module = importlib.import_module(top)
    found: dict[str, set[str]] = {}
    for word, inside in getattr(module, "_class_to_module", {}).items():
        if inside:
            found.setdefault(f"{top}.{inside}", set()).add(word)
    return found
