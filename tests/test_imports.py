"""Tests of which package may import which: a table, checked with every import statement of the package."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import ddplaunch

PACKAGE = Path(ddplaunch.__file__).parent

LAYERS = [
    {"dataclass", "errors", "files", "inherited", "loop", "rlimits", "words"},
    {"wire"},
    {"target"},
    {"plan"},
    {"devices", "clusters", "diagnosis"},
    {"control"},
    {"rank"},
    {"preload"},
    {"output", "warm"},
    {"agent"},
    {"job"},
    {"ssh", "queue"},
    {"console"},
    {"live"},
    {"cli"},
    {"commands", "python"},
]
"""From the bottom up; a layer imports from itself and from those below."""

HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}

INSIDE_USER_PROCESSES = {
    "rank.zygote": {
        "rank.channel",
        "rank.guard",
        "rank.leftovers",
        "rank.messages",
        "rank.preloading",
        "rank.processes",
        "rank.repairs",
        "rank.store",
        "rank.titles",
        "rank.warm",
        "rank.worker",
    },
    "rank.warm": {
        "rank.channel",
        "rank.guardian",
        "rank.inheritance",
        "rank.leftovers",
        "rank.messages",
        "rank.origins",
        "rank.processes",
    },
    "rank.guardian": {"rank.channel", "rank.processes"},
    "rank.inheritance": set(),
    "rank.origins": set(),
    "rank.allocations": set(),
    "rank.worker": {"target.arguments", "rank.answers", "rank.breakpoints", "rank.ending", "rank.messages", "errors"},
    "rank.answers": set(),
    "rank.breakpoints": {"rank.debugger"},
    "rank.debugger": {"rank.terminal"},
    "rank.terminal": {"rank.debugger"},
    "rank.ending": {"rank.messages"},
    "rank.in_flight": set(),
    "rank.guard": {"rank.messages"},
    "rank.leftovers": set(),
    "rank.preloading": {"rank.guard", "rank.messages"},
    "rank.notifier": {"rank.processes"},
    "rank.processes": {"rank.messages"},
    "rank.repairs": set(),
    "rank.titles": set(),
    "rank.sampler": set(),
    "rank.torch_state": set(),
    "rank.store": set(),
    "rank.channel": {"rank.messages"},
}
"""What runs in a rank or its zygote, and what of ours it may use: user code must not trip over anything else.
``rank.messages`` are types, which nothing loads.
"""

THIRD_PARTY = {
    "target": {"click"},
    "wire": {"msgspec"},
    "control": {"psutil"},
    "devices": {"psutil", "pynvml"},
    "rank": {"debugpy", "psutil", "torch"},
    "agent": {"psutil"},
    "job": {"msgspec"},
    "ssh": {"msgspec"},
    "queue": {"click", "msgspec"},
    "console": {"click", "rich"},
    "live": {"rich"},
    "cli": {"click", "tomli"},
    "python": {"IPython", "click", "cloudpickle", "pytest", "torch", "typing_extensions"},  # the last for types alone
    "commands": {"click", "msgspec", "rich", "torch", "yaml"},
}
"""What each layer may use of others; ``runtime`` is imported by user code and may use torch as well."""

ONLY_IN_RANKS = {"rank.worker", "runtime", "commands.doctor.benchmark", "python.body", "python.parcel", "python.ranks"}
"""Where torch may be imported at all, and only inside a function; the last is a process of its own too."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package by its name without the package's ("agent.worker"), with its syntax tree."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        yield name, ast.parse(path.read_text())


MODULES = dict(modules())


@cache
def imports(name: str) -> list[tuple[str, bool]]:
    """What a module imports, wherever the statement stands, and whether that is at its top."""
    return list(_imports(name, MODULES[name]))


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
                if f"{node.module}.{alias.name}".removeprefix("ddplaunch.") in MODULES:
                    yield f"{node.module}.{alias.name}", id(node) in top


def own(name: str) -> set[str]:
    return {
        each.removeprefix("ddplaunch").lstrip(".") for each, _ in imports(name) if each.partition(".")[0] == "ddplaunch"
    }


def layer(name: str) -> str:
    return name.partition(".")[0]


def tops(found: Iterable[str]) -> set[str]:
    """The packages outside of ours and of the standard library that names belong to."""
    return {name.partition(".")[0] for name in found} - sys.stdlib_module_names - {"ddplaunch"}


# Each asks one question of all modules, and names every module that answers it wrongly.


def test_every_module_has_its_layer():
    assert {layer(name) for name in MODULES} - {"", "__main__", "runtime", "submitit"} <= set(HEIGHT)


def test_imports_run_downward():
    wrong = []
    for name in MODULES:
        if layer(name) in HEIGHT:
            for imported in own(name) - {"", "runtime"}:  # which anybody may use
                above = HEIGHT[layer(imported)] - HEIGHT[layer(name)]
                if above > 0 or (above == 0 and layer(imported) != layer(name)):
                    wrong.append(f"{name} imports {imported} from {'above' if above else 'beside'} it")
    assert wrong == []


def command_of(name: str) -> str:
    """The command that a module belongs to: its folder, or its file."""
    return ".".join(name.split(".")[:2])


def test_no_command_imports_another():
    wrong = []
    for name in MODULES:
        if layer(name) == "commands" and name != "commands":
            others = {command_of(each) for each in own(name) if layer(each) == "commands" and each != "commands"}
            wrong += [f"{name} imports {other}" for other in others - {command_of(name)}]
    assert wrong == []


def test_what_runs_in_user_processes_is_known():
    in_ranks = {name for name in MODULES if layer(name) == "rank"}
    assert in_ranks - {"rank", "rank.messages"} == set(INSIDE_USER_PROCESSES)


def test_what_runs_in_user_processes_stands_alone():
    wrong = []
    for name in MODULES.keys() & INSIDE_USER_PROCESSES:
        may = INSIDE_USER_PROCESSES[name]
        wrong += [f"{name} imports {other}" for other in own(name) - {"", "preload", "rank", "target"} - may]
        wrong += [f"{name} imports {other}" for other in tops(each for each, top in imports(name) if top)]
    assert wrong == []


def test_types_are_for_type_checking_alone():
    wrong = []
    for name in MODULES.keys() & INSIDE_USER_PROCESSES:
        loaded = [node for node in MODULES[name].body if not isinstance(node, ast.If)]
        if "rank.messages" in "".join(map(ast.unparse, loaded)):
            wrong.append(name)
    assert wrong == []


def test_third_parties():
    wrong = []
    for name in MODULES:
        may = THIRD_PARTY.get(layer(name), {"runtime": {"torch"}, "submitit": {"submitit"}}.get(name, set()))
        wrong += [f"{name} imports {other}" for other in tops(each for each, _ in imports(name)) - may]
    assert wrong == []


def test_torch_is_never_imported_by_the_launcher():
    """Not even by what may import it, when it is imported itself."""
    wrong = []
    for name, tree in MODULES.items():
        if name not in ONLY_IN_RANKS and any(each.partition(".")[0] == "torch" for each, _ in imports(name)):
            wrong.append(name)
            continue
        statements = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        if any(each.startswith(("import torch", "from torch")) for each in statements):
            wrong.append(f"{name}, at its top")
    assert wrong == []
