"""Hands preloaded modules over to a rank's program, each after a check that a fresh import would have the same result.

A rank starts as a fresh interpreter does: the preloaded modules are not in ``sys.modules``, and what their imports
changed is undone. When the program imports one of them, these rules apply (docs/fidelity.md):

1. The modules that its import would load are compared with the record of ``ImportRecorder``: does every name lead to
   the same file, has every variable that is read the same value, are hooks, functions, warning filters, loggers and
   the examined files as they were?
2. If all is equal, these modules get into ``sys.modules`` in the order of their loading, and their changes are redone.
3. If not, and all of them are Python code or of the standard library, the program imports them afresh.
4. If not, and there is native code, which a process can load only once, or code that torch has registered, the rank
   starts over (``rank_restart``).

All this runs inside an import of the program, so nothing is imported here: an import would call this module again.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType
    from typing import Any

    from ddplaunch.core.rank import hidden_modules, import_check, import_recorder, inspection_endpoint
    from ddplaunch.core.rank.hidden_modules import HiddenModules, ImportSummary
    from ddplaunch.core.rank.import_effects import Changes
else:
    hidden_modules = load_private_module("core/rank/hidden_modules")  # noqa: F821
    import_check = load_private_module("core/rank/import_check")  # noqa: F821
    import_recorder = load_private_module("core/rank/import_recorder")  # noqa: F821
    inspection_endpoint = load_private_module("core/rank/inspection_endpoint")  # noqa: F821


class ModuleHandover:
    """Hands the hidden modules over to the program of one rank; created before the program starts."""

    def __init__(self, hidden: HiddenModules, start_over: Callable[[str, str], None]) -> None:
        """Begin to hand modules over.

        Args:
            hidden: the modules; this rank's own from now on.
            start_over: gets the name of a module and what differs; returns only if this process cannot start over, and
                has to go on with the module as it is.
        """
        self._hidden, self._record, self._modules = hidden, hidden.record, hidden.modules
        self._start_over, self._lock = start_over, RLock()
        self._check = import_check.ImportCheck(hidden)
        os.register_at_fork(after_in_child=self._lock._at_fork_reinit)  # type: ignore[attr-defined]
        # What a signal handler imported between these steps would count as the program's own module.
        with inspection_endpoint.BlockedSignals():
            hidden.hide_again()
            hidden.record.namespaces.begin()
            hidden.replace_import(self._hand_over)

    def _hand_over(self, name: str) -> ModuleType | None:
        """Return a hidden module, now in ``sys.modules`` with all that it has imported; None: import it afresh."""
        # Without blocked signals, handlers that import the same module could nest without end.
        with self._lock, inspection_endpoint.BlockedSignals():
            while name in self._modules:
                count = len(self._modules)
                summary = self._hidden.summarize_import(name)
                differs = self._find_other_file(name) or self._check.find_difference(summary)
                if len(self._modules) == count:
                    break
                # A signal handler has imported some of them meanwhile.
            else:
                return sys.modules.get(name)
            if differs:
                if not summary.native and "torch" not in summary.closure:
                    self._drop(name)
                    return None
                self._start_over(name, differs)  # Python code may have registered operators in torch's native code
            return self._reveal(name, summary)

    def _reveal(self, name: str, summary: ImportSummary) -> ModuleType:
        taken = self._hidden.take(summary.new)
        self._hidden.included.update(each for each in taken if each != name)
        self._redo_changes([summary.changes[each] for each in taken if each in summary.changes])
        for each in [each for each in taken if each == name or each in self._record.late_children]:
            self._record.namespaces.set_child(each, sys.modules[each])
        for finder in [each for each in sys.meta_path if isinstance(each, inspection_endpoint.PostImportHook)]:
            finder.check()
        return sys.modules[name]

    def _drop(self, name: str) -> None:
        """Forget a hidden module and its children: they are imported afresh."""
        for each in [each for each in list(self._modules) if each == name or each.startswith(name + ".")]:
            self._hidden.taken.append(each)
            del self._modules[each]

    def _find_other_file(self, name: str) -> str | None:
        """Report that a fresh import would load the module from another file."""
        parent = name.rpartition(".")[0]
        if not parent:
            origins = self._record.origins
            other = import_recorder.find_origin(name) if name in origins else None
            return f"{name} is {other}, not {origins[name]}" if name in origins and other != origins[name] else None
        origin = getattr(getattr(self._modules[name], "__spec__", None), "origin", None)
        path = getattr(sys.modules.get(parent), "__path__", None)
        if path is None or not isinstance(origin, str) or not os.path.isabs(origin):
            return None
        other = import_recorder.find_origin(name, path)
        return None if other in (origin, None) else f"{name} is {other}, not {origin}"

    # ------------------------------------------------------------------------------------------------- their changes

    def _redo_changes(self, changes: list[Changes]) -> None:
        """Redo what the imports of these modules changed outside them, in their order."""
        for change in changes:
            for name, (_, after) in change.variables.items():
                hidden_modules.set_variable(name, after)
                if after is None:
                    self._check.environment.pop(name, None)
                else:
                    self._check.environment[name] = after
            for list_name, before, after_items in change.lists:
                _apply_list_change(_find_list(list_name), before, after_items)
                _apply_list_change(self._check.lists[list_name], before, after_items)
                if list_name == import_recorder.FILTERS:
                    sys.modules["warnings"]._filters_mutated()
            for name, logger in change.loggers.items():
                if not hasattr(logger, "loggerMap"):  # else a placeholder, which the loggers below it make again
                    _add_logger(name, logger)
            for function, args, named in change.exits:
                self._register_exit_handler(function, args, named)

    def _register_exit_handler(self, function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if function in self._hidden.shared_exits:
            return
        finalize: Any = getattr(sys.modules.get("weakref"), "finalize", None)
        if getattr(function, "__qualname__", "") == "finalize._exitfunc" and finalize is not None:
            if finalize._registered_with_atexit:
                return
            finalize._registered_with_atexit = True
        self._hidden.atexit.register(function, *args, **named)


def _find_list(name: str) -> list[Any]:
    owner, _, attribute = name.rpartition(".")
    found: list[Any] = getattr(sys.modules[owner], attribute)
    return found


def _apply_list_change(items: list[Any], before: list[Any], after: list[Any]) -> None:
    """Change a list as ``before`` was changed to ``after``: new items go to the same end."""
    for item in [each for each in before if each not in after and each in items]:
        items.remove(item)
    new = [each for each in after if each not in before]
    if new and before and after[: len(before)] == before:
        items += new
    else:
        items[:0] = new


def _add_logger(name: str, logger: Any) -> None:
    """Add a logger as ``logging.Manager.getLogger`` does, between its parents and children."""
    manager = logger.manager
    former = manager.loggerDict.get(name)
    manager.loggerDict[name] = logger
    logger._cache.clear()
    if former is not None and hasattr(former, "loggerMap"):
        manager._fixupChildren(former, logger)
    manager._fixupParents(logger)
