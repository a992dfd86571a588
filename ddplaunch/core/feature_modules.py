"""Finds the modules of one name in the features' folders; the core names no feature."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType

from ddplaunch import features


def import_feature_modules(name: str) -> Iterator[ModuleType]:
    """Import the module ``name`` of each feature that has one."""
    for feature in iter_modules(features.__path__, f"{features.__name__}."):
        if find_spec(f"{feature.name}.{name}"):
            yield import_module(f"{feature.name}.{name}")
