"""The import auditor: checks that preloading a package has no effect that a rank could not check.

The table of known packages lists audited versions. A newer or patched one may do more. So after each audited import
the zygote compares its state with that before; at the end it looks for random generators: all ranks would share them.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from ddplaunch.core.rank import import_check, rank_exit
    from ddplaunch.core.rank.rank_runner import load_private_module
    from ddplaunch.core.rank.zygote_messages import ZygoteConfig
else:
    import_check = load_private_module("core/rank/import_check")
    rank_exit = load_private_module("core/rank/rank_exit")

_SIGNALS = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
_STREAMS = (1, 2)
_VARIABLES, _FOLDER, _UMASK, _HANDLERS = "the variable ", "the working folder", "the umask", "the handlers of signals"
_HARMLESS_VARIABLES = frozenset({"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "OPENBLAS_MAIN_FREE"})
"""Variables on how native threads start: known packages set them, without an effect on torch."""
_MAX_OBJECTS = 50_000  # checked at a time


class ImportAuditor:
    """Audits imports from its construction on; ``violation`` describes the first unexpected change, or is None.

    Meanwhile output is captured, and stdin is /dev/null: the user's input is for a rank.
    """

    def __init__(
        self,
        config: ZygoteConfig,
        initial_modules: frozenset[str],
        repairs: ModuleType,
        children: Callable[[], list[int]],
    ) -> None:
        """``initial_modules``: the modules of a fresh interpreter. ``repairs``: the loaded fork_fixups.py."""
        self._repairs, self._children = repairs, children
        self._known, self._baseline = config["known"], initial_modules
        self.violation: str | None = None
        self._loaded = frozenset(sys.modules)
        self._captured_output = [os.memfd_create("caught", os.MFD_CLOEXEC) for _ in _STREAMS]
        self._flush()
        self._saved_streams = [os.dup(number) for number in (0, *_STREAMS)]
        devnull = os.open(os.devnull, os.O_RDONLY)
        for number, fd in enumerate((devnull, *self._captured_output)):
            os.dup2(fd, number)
        os.close(devnull)
        self._before = self._capture_state()

    def check_import(self, name: str) -> None:
        """Called right after the import of a module: compare the state of the process with that before the import."""
        self._flush()
        now = self._capture_state()
        for what, value in now.items():
            if self.violation is None and value != self._before[what]:
                names = {each for each, _ in value.items() ^ self._before[what].items()} if what == _VARIABLES else ()
                self.violation = f"importing {name} changes {what}{', '.join(sorted(names))}"
        if self.violation is None and any(os.fstat(fd).st_size for fd in self._captured_output):
            self.violation = f"importing {name} prints"

    def restore(self, environ: dict[str, str]) -> None:
        """Restore the state that an exec'ed interpreter inherits; ``environ``: the former environment."""
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(self._before[_FOLDER])
        os.umask(self._before[_UMASK])
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip(_SIGNALS, self._before[_HANDLERS], strict=False):  # its last element is the timer
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)

    def finish(self) -> None:
        """Restore stdin, stdout and stderr, and check all loaded modules."""
        self._flush()
        for number, fd in enumerate(self._saved_streams):
            os.dup2(fd, number)
            os.close(fd)
        for fd in self._captured_output:
            os.close(fd)
        self.violation = self.violation or self._find_unknown_module() or self._find_random_generator()

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # an import may have replaced it; the descriptors are what counts
                pass

    def _capture_state(self) -> dict[str, Any]:
        os.umask(umask := os.umask(0o77))
        state: dict[str, Any] = {
            _VARIABLES: self._list_checked_variables(),
            _FOLDER: rank_exit.current_folder(),
            _HANDLERS: [*map(signal.getsignal, _SIGNALS), signal.getitimer(signal.ITIMER_REAL)],
            _UMASK: umask,
            "open files": _list_open_fds(),
            "child processes": self._children(),
        }
        torch = sys.modules.get("torch")
        if hasattr(torch, "get_default_dtype"):
            state["torch's default dtype"] = torch.get_default_dtype()  # type: ignore[union-attr]
        return state

    def _list_checked_variables(self) -> dict[str, str]:
        """Return the variables that an import must not change: of thread pools, and those that native code sets."""
        return {
            name: value
            for name, value in import_check.native_environment().items()
            if os.environ.get(name) != value
            or (name.startswith(import_check.OF_THREAD_POOLS) and name not in _HARMLESS_VARIABLES)
        }

    def _find_unknown_module(self) -> str | None:
        """Find a module that belongs to no known package, by the folder or file it came from."""
        known = {*self._known, *sys.stdlib_module_names}
        for name in [each for each in sys.modules if each not in self._loaded and each not in self._baseline]:
            origin = str(getattr(getattr(sys.modules[name], "__spec__", None), "origin", None) or "")
            inside = origin.partition("-packages" + os.sep)[2]
            top = inside.partition(os.sep)[0].partition(".")[0] or name.partition(".")[0]
            is_stdlib = not inside and (os.sep not in origin or origin.startswith(os.path.dirname(os.__file__)))
            if not (is_stdlib or top in known or top.endswith("__mypyc")):
                return f"{top} was imported, which is not a known package"
        return None

    def _find_random_generator(self) -> str | None:
        """Find a random generator that is not reseeded in each fork."""
        names = (*_REPAIRED_GENERATORS, *self._repairs.GENERATORS)
        allowed = {id(self._repairs.resolve_name(name, sys.modules)) for name in names}
        kinds = _random_generator_types()
        objects = gc.get_objects()
        for start in range(0, len(objects), _MAX_OBJECTS):
            referents = gc.get_referents(*objects[start : start + _MAX_OBJECTS])
            if kinds.isdisjoint(map(type, referents)):  # runs no Python code per object
                continue
            for each in referents:
                if type(each) in kinds and id(each) not in allowed:
                    return f"an import keeps a random generator, a {type(each).__name__}"
        return None


_REPAIRED_GENERATORS = (
    *("random._inst", "numpy.random.mtrand._rand", "numpy.random.mtrand._rand._bit_generator"),
    *("torch.default_generator", "torch.random.default_generator"),
)
"""The generators of Python, numpy and torch: reseeded in each rank, or by the random module itself."""


def _random_generator_types() -> frozenset[type]:
    """Return the types of random generators."""
    bases = {"random": ["Random"], "numpy.random": ["Generator", "RandomState", "BitGenerator"], "torch": ["Generator"]}
    found = {getattr(sys.modules.get(module), name, None) for module, names in bases.items() for name in names} - {None}
    todo: list[Any] = [*found]
    for kind in todo:  # which grows
        todo += type.__subclasses__(kind)
    return frozenset(todo) - {getattr(sys.modules.get("random"), "SystemRandom", object)}


def _list_open_fds() -> set[str]:
    """Return all open descriptors with their paths, except stdout and stderr."""
    numbers = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    return {f"{fd} {os.path.realpath('/proc/self/fd/' + fd)}" for fd in numbers if int(fd) not in _STREAMS}
