"""Decides which exit handlers (atexit, weakref.finalize) of preloaded modules run in each rank, and which only once.

A handler that flushes, closes or joins concerns a process's own state, so each rank runs it (logging.shutdown,
multiprocessing's _exit_function). One that removes files concerns files that all ranks share, and the first rank to end
would remove them for the others (temporary folders of wandb and matplotlib): it runs once, in the zygote.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_REMOVE_FUNCTIONS = frozenset({"rmtree", "_rmtree", "unlink", "rmdir", "removedirs", "cleanup"})
"""Names in the code of a function that removes files, as tempfile.TemporaryDirectory's does."""

_TORCH_REMOVE_FUNCTION = "_del_library"
"""Unregisters torch's operators one by one: 25 ms in each rank, which exits without tearing torch down."""

_CLEANUP_TIMEOUT_S = 3  # limit for removing files: with the launcher gone, no other process would end this one


class AtexitCleanup:
    """Context manager that records the exit handlers that are registered within its block and remove files."""

    def __init__(self) -> None:
        self.is_shared = False  # whether other runs share the files: then the process that they share removes them
        self._register = atexit.register
        self.functions: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, object]]] = []
        self._finalizers: list[Any] = []

    def __enter__(self) -> None:
        register = self._register

        def record_and_register(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
            if _removes_files(function):
                self.functions.append((function, args, kwargs))
            return register(function, *args, **kwargs)

        atexit.register = record_and_register  # type: ignore[assignment]

    def __exit__(self, *error: object) -> None:
        atexit.register = self._register
        finalize = getattr(sys.modules.get("weakref"), "finalize", None)
        for finalizer, info in list(getattr(finalize, "_registry", {}).items()):
            if info.atexit and _removes_files(info.func):
                self._finalizers.append(finalizer)
            if getattr(info.func, "__name__", "") == _TORCH_REMOVE_FUNCTION and info.func.__module__.startswith(
                "torch."
            ):
                finalizer.atexit = False

    def disable_in_rank(self) -> None:
        """In a rank: disable the recorded finalizers; ``module_handover`` does not register the recorded functions."""
        for finalizer in self._finalizers:
            finalizer.detach()

    def run(self) -> None:
        """Called in the zygote when no rank is left: run the recorded handlers."""
        if self.is_shared or not (self.functions or self._finalizers):
            return
        pid = os.fork()  # so that the alarm kills only the handlers
        if pid:
            os.waitpid(pid, 0)
            return
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_CLEANUP_TIMEOUT_S)
        finalizers: list[Any] = [(finalizer, (), {}) for finalizer in self._finalizers]
        for function, args, kwargs in [*reversed(self.functions), *finalizers]:
            try:
                function(*args, **kwargs)
            except BaseException:
                pass  # the job has ended
        os._exit(0)


def _removes_files(function: Any) -> bool:
    """Whether a function removes files, judged by its name and the names in its code."""
    function = getattr(function, "func", function)  # of functools.partial
    function = getattr(function, "__func__", function)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    name = getattr(function, "__name__", "")
    in_os = name == "remove" and getattr(function, "__module__", "") == "posix"
    return in_os or not _REMOVE_FUNCTIONS.isdisjoint({name, *names})
