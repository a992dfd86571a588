"""Selects which of a program's imports are preloaded: done once in the zygote, the process that forks all ranks.

Only packages of the table known.json are preloaded, in audited versions: the audit has checked what a rank cannot
check, such as random generators and process ids that an import keeps.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct

from ddplaunch.features.preload.known_packages import InstalledPackages, KnownPackage, PackageTable
from ddplaunch.features.preload.program_source import TORCH, Import, ProgramSource
from ddplaunch.system.target import source


class SelectedImports(Struct, frozen=True):
    """What is preloaded for a program.

    Attributes:
        modules: what to import after torch, in order.
        excluded: the top-level modules that each rank imports itself, each with the reason, like "not in the table".
        known: the top-level modules that these imports may load.
    """

    modules: tuple[str, ...]
    excluded: tuple[tuple[str, str], ...]
    known: tuple[str, ...]


def select_imports(
    program: ProgramSource, table: PackageTable, sys_path_0: str, *, include_deferred: bool
) -> SelectedImports:
    """Select the imports of a program that may be preloaded; ``include_deferred``: also those in functions.

    ``sys_path_0``: the folder of the program.
    """
    installed = InstalledPackages()
    why_unusable = lru_cache(maxsize=None)(lambda name: installed.why_unusable(table.packages[name], table))
    modules: dict[str, None] = {}
    excluded: dict[str, str] = {}
    selected: dict[str, KnownPackage] = {}
    for step in sorted(program.imports, key=lambda each: each.is_deferred):
        if step.top_level_name == TORCH or (step.is_deferred and not include_deferred):
            continue
        package = table.find_package(step.module)
        why = "not in the table" if package is None else why_unusable(package.name)
        if package is not None and why is None:
            selected[package.name] = package
            modules.update(dict.fromkeys(_list_modules(package, step)))
        elif source.find_module(step.top_level_name, sys_path_0) is not None:
            excluded.setdefault(step.top_level_name, why or "")
    for package in selected.values() if include_deferred else ():
        used = [module for module, words in package.modules.items() if not program.words.isdisjoint(words)]
        modules.update(dict.fromkeys(used))
    chosen = [each for each in modules if (owner := table.find_package(each)) and why_unusable(owner.name) is None]
    audited = [each for each in table.packages.values() if not (each.refused or installed.why_not_audited(each))]
    return SelectedImports(
        modules=tuple(each for each in chosen if installed.has_module(each)),
        excluded=tuple(excluded.items()),
        known=tuple(sorted({*table.torch_parts, *(top for each in audited for top in each.top_level_names)})),
    )


def _list_modules(package: KnownPackage, step: Import) -> list[str]:
    """List the modules of a package that an import statement uses."""
    imported = {f"{step.module}.{name}" for name in step.names}
    return [
        module
        for module, words in package.modules.items()
        if step.module == module
        or step.module.startswith(module + ".")
        or module in imported
        or not set(words).isdisjoint(step.names)
    ]
