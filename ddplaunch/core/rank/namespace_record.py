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
_VERSION_OFFSET = 24  # in a dictionary, after two words of each object and its length (ma_version_tag, PEP 509)


class NamespaceRecord:
    """The namespaces of modules at its creation; those of the standard library's classes, too.

    To read a value from a namespace writes its reference count, and so copies the memory page that it is in. Until
    Python 3.13 each dictionary has a number that tells whether it was changed since, so that only those are read.
    """

    def __init__(self, modules: Mapping[str, Any], initial: Container[str]) -> None:
        """``initial``: the names of those that Python starts with."""
        import ctypes

        self._number, self._initial = ctypes.c_uint64, initial
        self._spaces = {
            name: [(self._version(space), space, dict(space)) for space in _list_namespaces(name, module)]
            for name, module in modules.items()
            if name not in _UNCOMPARED_MODULES and hasattr(module, "__dict__")
        }
        self._began = -1
        self.begin()

    def _version(self, space: Namespace) -> Any:
        return self._number.from_address(id(space) + _VERSION_OFFSET)

    def begin(self) -> None:
        """Expect changes from now on: those before, by ddplaunch, left functions and classes as they were."""
        space: Namespace = {"name": 0}
        version = self._version(space)
        numbers = [version.value]
        for value in (1, 2):
            space["name"] = value
            numbers.append(version.value)
        self._began = numbers[-1] if numbers[0] < numbers[1] < numbers[2] else -1  # compare all

    def list_replaced(self, names: Container[str]) -> Iterator[tuple[str, list[object]]]:
        """Return the loaded modules that were patched, and what was replaced there: of ``names``, or initial ones."""
        spaces, initial = self._spaces, self._initial
        for name in [each for each in list(sys.modules) if each in spaces and (each in names or each in initial)]:
            for version, now, before in spaces[name]:
                if version.value <= self._began or all(map(_is, map(now.get, before), before.values())):
                    continue
                different = {key: value for key, value in before.items() if now.get(key) is not value}
                replaced = [
                    value
                    for key, value in different.items()
                    if (type(value) in _CODE_KINDS or isinstance(value, type)) and key not in _UNCOMPARED.get(name, ())
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
