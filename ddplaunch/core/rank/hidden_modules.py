"""The modules that the zygote has preloaded, hidden from the ranks until ``module_handover`` hands them over."""

from __future__ import annotations

import _frozen_importlib as bootstrap
import os
import re
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from types import ModuleType
    from typing import Any

    from ddplaunch.core.rank import import_effects, import_recorder
    from ddplaunch.core.rank.import_recorder import ImportRecorder
else:
    import_effects = load_private_module("core/rank/import_effects")  # noqa: F821
    import_recorder = load_private_module("core/rank/import_recorder")  # noqa: F821


_MULTIPROCESSING, _MP_MAIN = "multiprocessing", "__mp_main__"


class HiddenModules:
    """The hidden preloaded modules: those of the zygote, and in each fork a rank's own copy."""

    def __init__(
        self, record: ImportRecorder, settings: Mapping[str, str], native_reads: str, shared_exits: Collection[object]
    ) -> None:
        """Hide the recorded modules, and undo the changes that their imports made outside of them.

        Args:
            record: the record of the imports.
            settings: variables that were set during the imports only, as the program is expected to set them.
            native_reads: a pattern of the variables that native code reads as it is loaded.
            shared_exits: exit handlers that run once for all ranks, in the zygote.
        """
        import atexit

        self.record, self.atexit, self.shared_exits = record, atexit, shared_exits
        self.native_reads = re.compile(native_reads)
        names = "\0".join(record.list_added()).split("\0")  # new strings, side by side in memory as the modules are
        self.modules = dict(zip(names, map(sys.modules.pop, names), strict=True))
        if _MULTIPROCESSING in self.modules:
            sys.modules.pop(_MP_MAIN, None)
        self.every = dict(self.modules)  # keeps those that are handed over
        for name in record.late_children:
            parent, _, child = name.rpartition(".")
            (self.every.get(parent) or sys.modules[parent]).__dict__.pop(child, None)
        self.names = record.initial.union(self.modules)  # those of a rank when its program starts, shown or hidden
        self.taken: list[str] = []  # by the program of this rank: handed over, or imported afresh
        self.included: set[str] = set()  # those that came with a module which imports them
        self._undo_changes()
        self.settings = settings
        self._real: Callable[[str, Any], ModuleType] = bootstrap._find_and_load_unlocked  # type: ignore[attr-defined]
        self.replace_import(self._expose)

    def _undo_changes(self) -> None:
        self.atexit._clear()
        if "weakref" in self.every:
            self.every["weakref"].finalize._registered_with_atexit = False
        if "logging" in self.every:
            self.every["logging"].root.manager.loggerDict.clear()
        for module, changes in reversed(self.record.changes.items()):
            for name, (before, after) in changes.variables.items() if module else ():
                if os.environ.get(name) == after:
                    set_variable(name, before)
        lists = self.record.first_lists
        sys.meta_path[:], sys.path_hooks[:] = lists[import_recorder.FINDERS], lists[import_recorder.PATH_HOOKS]
        if (warnings := self.every.get("warnings")) is not None:
            warnings.filters[:] = lists[import_recorder.FILTERS]
            warnings._filters_mutated()

    def replace_import(self, hand_over: Callable[[str], ModuleType | None]) -> None:
        """Make imports of hidden modules call ``hand_over``; if it returns None, Python imports the module as usual.

        No finder does it, so that ``importlib.util.find_spec`` and ``sys.meta_path`` stay truthful.
        """
        hidden, real = self.modules, self._real

        def _find_and_load_unlocked(name: str, import_: Any) -> ModuleType:
            if name in hidden:
                parent = name.rpartition(".")[0]
                if parent and parent not in sys.modules:
                    import_(parent)
                    if name in sys.modules:
                        return sys.modules[name]
                if name in hidden and (module := hand_over(name)) is not None:
                    return module
            return real(name, import_)

        hide = import_recorder.hide_frames
        bootstrap._find_and_load_unlocked = hide(_find_and_load_unlocked)  # type: ignore[attr-defined]

    def _expose(self, name: str) -> ModuleType:
        """Put a hidden module into ``sys.modules`` for ddplaunch's own code, before the program of a rank starts."""
        sys.modules[name] = self.modules[name]
        return sys.modules[name]

    def hide_again(self) -> None:
        """Hide the modules that ddplaunch's own code has imported since the last time."""
        for name in self.record.list_added():
            self.modules.setdefault(name, module := sys.modules.pop(name))
            self.every.setdefault(name, module)

    def take(self, names: list[str]) -> list[str]:
        """Put modules into ``sys.modules`` for the program of this rank.

        Return their names, without those that a signal handler has imported meanwhile.
        """
        modules: dict[str, ModuleType] = {}
        for name, module in zip(names, map(self.modules.get, names), strict=True):
            if module is not None:
                modules[name] = module
            if name == _MULTIPROCESSING:  # its import makes an alias of the main module
                modules[_MP_MAIN] = sys.modules["__main__"]
        sys.modules.update(modules)
        # Not before: a signal handler may import one.
        taken = [name for name in modules if self.modules.pop(name, None) is not None]
        self.taken += taken
        return taken

    def summarize_import(self, name: str) -> ImportSummary:
        """Return what the imports of a module, and of the still hidden modules that it loads, have read and changed."""
        closure = self.record.closures.get(name) or self.record.closure(name)
        new = [each for each in list(self.modules) if each in closure]
        return ImportSummary(new, closure, self.record)

    def show(self) -> None:
        """Make the modules visible again, in a fork that serves the store."""
        sys.modules.update(self.modules)


class ImportSummary:
    """What the imports of modules that are handed over together have read and changed."""

    def __init__(self, new: list[str], closure: set[str], record: ImportRecorder) -> None:
        """``new``: the modules in the order of their loading; ``closure``: also those that are visible already."""
        self.new, self.closure = new, closure
        self.has_packages = not record.packages.isdisjoint(new)  # some are not of the standard library
        self.native = record.native.intersection(new)
        self.uses_torch = not record.torch_users.isdisjoint(new)
        self.changes = {each: record.changes[each] for each in new if each in record.changes}
        self.loggers = {name: logger for each in self.changes.values() for name, logger in each.loggers.items()}
        self.inputs = import_effects.Inputs()
        for changes in self.changes.values():
            for name, (before, _) in changes.variables.items():
                self.inputs.variables.setdefault(name, before)
        for packed in [record.packed_inputs[each] for each in new if each in record.packed_inputs]:
            self.inputs.add(packed)


def set_variable(name: str, value: str | None) -> None:
    """Set an environment variable; None removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
