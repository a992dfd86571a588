"""Tests of which package may import which: a table, checked with every import statement of the package."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import ddplaunch
from ddplaunch.core.feature_registry import load_features
from ddplaunch.features import FEATURES, OBSERVE

PACKAGE = Path(ddplaunch.__file__).parent

LAYERS = ("base", "system", "core", "observe", "cli", "features")
"""From the bottom up; a layer imports from itself and from those below. Nothing below names a feature."""

CORE_FLOORS = (
    {"job", "node"},  # machines: they decide, and are pure
    {"rank", "output", "net", "agent", "control_socket"},  # effects
)
"""The folders of the core, above its own modules, which are data: events, messages, failures, options and configs."""

CORE_INTERFACES = {"core.feature", "core.feature_registry", "core.rpc_kind"}
"""What features implement: these modules name the types of all floors, for type checking alone."""

FEATURE_IMPORTS = {
    "doctor": {"check"},
    "ssh": {"code"},
    "kubernetes": {"code", "manifest", "submit"},
    "live": {"runs"},
    "manifest": {"code", "submit"},
    "nccl": {"runs"},
    "python": {"preload"},
    "submit": {"programs", "code", "reservations"},
}
"""Features that import from other features."""

REQUIRED_WITHOUT_IMPORT = {"warm": {"preload"}}
"""Features that need another one for what it does: a warm zygote is kept for what is preloaded."""

LOADED_IN_RANKS = {
    "core.rank.rank_runner": {"base.errors", "system.target.arguments"},
    "core.rank.zygote_messages": {"system.target.signature"},  # for types alone
}
"""What the files of a folder ``rank`` may use of the package beside such files, which run in the user's process."""

LOADED_BY_PATH = {"system.processes.proc_utils"}
"""Files outside of folders ``rank`` that zygotes load too, and that stand alone in the same way."""

PROGRAMS_FOR_RANKS = ("features.python.rank",)
"""Folders ``rank`` whose files are imported by name in a process that imports the package anyway."""

THIRD_PARTY = {
    "base": {"click", "msgspec"},
    "system": {"click", "msgspec", "psutil", "pynvml"},
    "core": {"click", "msgspec", "psutil", "torch"},
    "observe": {"click", "msgspec", "psutil"},
    "cli": {"click", "msgspec", "rich", "tomli"},
    "features": {
        *("IPython", "click", "cloudpickle", "debugpy", "jinja2", "msgspec", "psutil", "pytest", "rich", "torch"),
        "yaml",
        "typing_extensions",  # for types alone
    },
}
"""What each layer may use of others; ``runtime`` is imported by user code and may use torch as well."""

ONLY_IN_RANKS = {
    "core.rank.rank_runner",
    "runtime",
    "features.doctor.benchmark",
    "features.torch_debug.frontend",
    "features.torch_debug.rank.worker_server",
    "features.python.rank.pytest_body",
    "features.python.pickle_files",
    "features.python.rank.call_loop",
}
"""Where torch may be imported at all, and only inside a function; some are processes of their own."""


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its name without the package's ("core.node.machine"), with its syntax tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text())
    return found


@cache
def imports(name: str) -> list[tuple[str, bool]]:
    """What a module imports, wherever the statement stands, and whether that is at its top."""
    return list(_imports(name, modules()[name]))


def _imports(name: str, tree: ast.Module) -> Iterator[tuple[str, bool]]:
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            top.update(map(id, node.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            yield node.module or "", id(node) in top
            for alias in node.names:
                if f"{node.module}.{alias.name}".removeprefix("ddplaunch.") in modules():
                    yield f"{node.module}.{alias.name}", id(node) in top


def own(name: str) -> set[str]:
    """The modules of the package that a module imports; of packages without code only what is taken from them."""
    found = {
        each.removeprefix("ddplaunch").lstrip(".") for each, _ in imports(name) if each.partition(".")[0] == "ddplaunch"
    }
    return {each for each in found if len(modules()[each].body) > 1 or each in ("", "features")}


def layer(name: str) -> str:
    return name.partition(".")[0]


def tops(found: Iterable[str]) -> set[str]:
    """The packages outside of ours and of the standard library that names belong to."""
    return {name.partition(".")[0] for name in found} - sys.stdlib_module_names - {"ddplaunch"}


# Each asks one question of all modules, and names every module that answers it wrongly.


def is_in_ranks(name: str) -> bool:
    """Whether a module is one of those that run in the user's processes: it is in a folder ``rank``, or named above."""
    return "rank" in name.split(".")[1:-1] or name in LOADED_BY_PATH


@cache
def imported_files(name: str) -> set[str]:
    """The modules that an import statement of a module takes something from; a package only if that is in its file.

    Without ``ddplaunch`` itself, which names the public API for type checkers.
    """
    found = set()
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ddplaunch":
            module = (node.module or "").removeprefix("ddplaunch").lstrip(".")
            inner = (f"{module}.{alias.name}".lstrip(".") for alias in node.names)
            found |= {each if each in modules() else module for each in inner}
    return found - {""}


def reachable(name: str) -> set[str]:
    """All modules that a module imports, directly or by others."""
    found: set[str] = set()
    left = [name]
    while left:
        new = imported_files(left.pop()) - found
        found |= new
        left += new
    return found


def test_every_module_has_its_layer():
    assert {layer(name) for name in modules()} - {"", "__main__", "runtime", "submitit"} <= set(LAYERS)


def test_imports_run_downward():
    found = {
        (name, imported)
        for name in modules()
        for imported in own(name) - {"", "runtime"}  # which any module may use
        if layer(name) in LAYERS and LAYERS.index(layer(imported)) > LAYERS.index(layer(name))
    }
    assert sorted(found) == []


def floor(name: str) -> int:
    """The floor of a module of the core: 0 is data."""
    folder = name.split(".")[1]
    return next((number for number, folders in enumerate(CORE_FLOORS, 1) if folder in folders), 0)


def test_the_core_has_floors():
    """Its modules import from their own floor and from those below, and its folders in one direction."""
    wrong, between = [], set()
    for name in modules():
        for imported in own(name) if name.startswith("core.") else ():
            if not imported.startswith("core.") or (name in CORE_INTERFACES and imported not in loaded_by(name)):
                continue
            if floor(imported) > floor(name):
                wrong.append((name, imported))
            elif floor(name) == floor(imported) > 0 and name.split(".")[1] != imported.split(".")[1]:
                between.add((name.split(".")[1], imported.split(".")[1]))
    assert wrong == []
    assert {(a, b) for a, b in between if (b, a) in between} == set()
    assert not {(a, b) for a, b in between if a in CORE_FLOORS[0]}, "the job's decisions and a node's are apart"


def loaded_by(name: str) -> set[str]:
    """The modules of the package that a module imports when it is imported, or later: not for type checking alone."""
    for_types = [
        ast.unparse(each)
        for node in ast.walk(modules()[name])
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for each in node.body
    ]
    return {each for each in own(name) if not any(f"ddplaunch.{each} import" in text for text in for_types)}


def test_lower_layers_do_not_name_upper_ones_in_texts_either():
    """A statement for another Python comes from above; only ``load_features`` of the core finds features by name."""
    files = [path for name in ("base", "system", "core", "observe") for path in (PACKAGE / name).rglob("*.py")]
    wrong = [path for path in files if re.search(r"ddplaunch[./](cli|features)", path.read_text())]
    assert wrong == [PACKAGE / "core/feature_registry.py"]


def test_features_are_not_named_in_texts_either():
    """Files that are loaded by path or name: a feature names its own, and those of features that it requires."""
    wrong = []
    for name, tree in modules().items():
        own_feature = name.split(".")[1] if layer(name) == "features" and name.count(".") else ""
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and layer(name) in LAYERS:
                found = re.fullmatch(r"(?:ddplaunch[./])?features[./](\w+)[./][\w./]+", node.value)
                if found and found[1] not in {own_feature, *FEATURE_IMPORTS.get(own_feature, ())}:
                    wrong.append(f"{name}: {node.value}")
    assert wrong == []


def test_files_import_each_other_without_circles():
    """Also none through an import inside a function, or for type checking alone."""
    reached = {name: reachable(name) for name in modules()}
    circles = {frozenset(other for other in reached[name] if name in reached[other]) for name in modules()}
    assert sorted(map(sorted, circles - {frozenset()})) == []


def test_features_import_known_features():
    found: dict[str, set[str]] = {}
    for name in modules():
        for imported in own(name):
            of, other = name.split("."), imported.split(".")
            if of[0] == other[0] == "features" and len(of) > 1 and len(other) > 1 and of[1] != other[1]:
                found.setdefault(of[1], set()).add(other[1])
    assert found == FEATURE_IMPORTS


def test_features_require_those_that_they_import():
    registered = {name: feature for name, feature in load_features()}
    assert [*registered] == [*OBSERVE, *FEATURES]  # else one is above a feature that it requires
    for name, feature in registered.items():
        imported = {*registered} & FEATURE_IMPORTS.get(name, set())
        needed = imported | REQUIRED_WITHOUT_IMPORT.get(name, set())
        assert {*feature.requires} == needed, name


def test_rank_folders_import_the_standard_library_only():
    wrong = []
    for name in modules():
        if is_in_ranks(name) and not name.startswith(PROGRAMS_FOR_RANKS):
            others = {each for each in own(name) if not is_in_ranks(each)} - {"", "core.rank"}
            packages = {each for each in others if each.rpartition(".")[2] == "rank" or each == "system.target"}
            wrong += [f"{name} imports {other}" for other in others - packages - LOADED_IN_RANKS.get(name, set())]
            wrong += [f"{name} imports {other}" for other in tops(each for each, top in imports(name) if top)]
    assert wrong == []


def test_types_are_for_type_checking_alone():
    wrong = []
    for name in modules():
        loaded = [node for node in modules()[name].body if not isinstance(node, ast.If)]
        text = "".join(map(ast.unparse, loaded))
        if is_in_ranks(name) and not name.endswith("_messages") and "_messages import" in text:
            wrong.append(name)
    assert wrong == []


def test_third_parties():
    wrong = []
    for name in modules():
        may = THIRD_PARTY.get(layer(name), {"runtime": {"torch"}, "submitit": {"submitit"}}.get(name, set()))
        wrong += [f"{name} imports {other}" for other in tops(each for each, _ in imports(name)) - may]
    assert wrong == []


def test_torch_is_never_imported_by_the_launcher():
    """Not even by what may import it, when it is imported itself."""
    wrong = []
    for name, tree in modules().items():
        if name not in ONLY_IN_RANKS and any(each.partition(".")[0] == "torch" for each, _ in imports(name)):
            wrong.append(name)
            continue
        statements = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        if any(each.startswith(("import torch", "from torch")) for each in statements):
            wrong.append(f"{name}, at its top")
    assert wrong == []
