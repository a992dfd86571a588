"""Remembers the functions and classes of all modules, and finds those that a program has replaced (monkeypatched)."""

from __future__ import annotations

import gc
import sys
from _operator import is_ as _is

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping
    from typing import Any

    from ddplaunch.core.rank import import_effects

    Namespace = dict[str, Any]
    """The attributes of a module or a class."""

else:
    import_effects = load_private_module("core/rank/import_effects")  # noqa: F821

_UNCOMPARED_MODULES = ("__main__", "__mp_main__", "sys", "_frozen_importlib", "_frozen_importlib_external")
_UNCOMPARED = {
    "builtins": {"print", "input", "breakpoint"},
    "threading": {"excepthook"},
    "importlib._bootstrap": {"_find_and_load", "_find_and_load_unlocked", "_new_module"},
    "importlib._bootstrap_external": {"_write_atomic"},
}
"""Functions that programs often replace, and that no import calls or stores; and those that ddplaunch replaces."""

_CODE_KINDS = (type(lambda: None), type(len))
_VERSION_INDEX = 3  # in a dictionary, after two words of each object and its length (ma_version_tag, PEP 509)


class NamespaceRecord:
    """The namespaces of modules as they were when it was created; in the standard library, also those of classes.

    To read a value from a namespace writes its reference count, and so copies the memory page that it is in. Until
    Python 3.13 each dictionary has a version number, which every change changes; so only changed ones are read.
    """

    def __init__(self, modules: Mapping[str, Any], initial: Container[str]) -> None:
        """``initial``: the names of the modules that Python loads at start."""
        import ctypes

        self._initial = initial
        self._spaces: list[tuple[str, Namespace, Namespace]] = [("", {}, {})]  # the first one tests the versions
        self._indexes: dict[str, int] = {}
        for name, module in modules.items():
            if name not in _UNCOMPARED_MODULES and hasattr(module, "__dict__"):
                self._indexes[name] = len(self._spaces)
                self._spaces += [(name, space, dict(space)) for space in _list_namespaces(name, module)]
        addresses, number = [id(space) for _, space, _ in self._spaces], ctypes.c_uint64
        first, count = min(addresses), len(addresses)
        self._memory: Any = (number * (max(addresses) // 8 - first // 8 + 4)).from_address(first)
        self._places: Any = (number * count)(*((each - first) // 8 + _VERSION_INDEX for each in addresses))
        self._versions: Any = (number * count)()
        tried: list[int] = []
        for self._spaces[0][1]["name"] in range(3):
            tried.append(self._memory[self._places[0]])
        self._has_versions = tried[0] < tried[1] < tried[2]

    def begin(self) -> None:
        """In a rank: begin to look for changes. Earlier changes are ddplaunch's own."""
        self._versions[:] = [self._memory[place] for place in self._places]

    def set_child(self, name: str, module: object) -> None:
        """Set a module as attribute of its parent package, if it has one: that is not a change."""
        parent, _, child = name.rpartition(".")
        index = self._indexes.get(parent, 0)
        is_same = self._memory[self._places[index]] == self._versions[index]
        if parent:
            setattr(sys.modules[parent], child, module)
        if is_same:
            self._versions[index] = self._memory[self._places[index]]

    def list_replaced(self, names: Container[str]) -> Iterator[tuple[str, list[object]]]:
        """Yield the patched modules among ``names`` and the initial ones, each with the objects that were replaced."""
        memory, places, versions = self._memory, self._places, self._versions
        for index, place in enumerate(places):
            if (version := memory[place]) == versions[index] and self._has_versions:
                continue
            name, now, before = self._spaces[index]
            if name not in sys.modules or not (name in names or name in self._initial):
                continue
            if all(map(_is, map(now.get, before), before.values())):
                versions[index] = version
                continue
            replaced = [
                value
                for key, value in before.items()
                if now.get(key) is not value
                and (type(value) in _CODE_KINDS or isinstance(value, type))
                and key not in _UNCOMPARED.get(name, ())
            ]
            if replaced:
                yield name, replaced


def _list_namespaces(name: str, module: Any) -> list[Namespace]:
    """List the namespace of a module and, in the standard library, those of its classes."""
    spaces: list[Namespace] = [module.__dict__]
    if import_effects.is_stdlib(name):
        classes = [each for each in module.__dict__.values() if type(each) is type and each.__module__ == name]
        spaces += [gc.get_referents(vars(each))[0] for each in classes]  # the dictionary behind the proxy
    return spaces
