"""Compares the process state that all modules share during imports, inside an audit's interpreters.

Standard library only; loaded by its path. The state is captured, which takes some 0.1 ms, at the start and the end of
each module, so a change between two captures was made by the modules on the import stack.
"""

from __future__ import annotations

import _locale
import builtins
import gc
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from tests.tools.preload_audit import import_stack, recorder

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SIGNALS = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
_LIBC_SIGNALS = 3 << 31  # signals 32 and 33, which the C library handles from the first thread on
_THREAD_END_TIMEOUT_S = 1.0  # for the kernel to end a thread that was joined

_DESCRIPTIONS = {
    "SigBlk": "blocks a signal",
    "SigIgn": "ignores a signal",
    "SigCgt": "handles a signal",
    "signal handlers": "handles a signal",
    "random": "moves Python's random state",
    "numpy.random": "moves numpy's random state",
    "torch.random": "moves torch's random state",
    "output": "prints",
    "alarms": "sets an alarm",
    "logging": "sets up logging",
}
"""What is recorded of a change, by the state; of others "changes" and the state."""


class ProcessStateMonitor:
    """Records changes of the process state; ``on_module_start`` and ``on_module_end`` are for the import stack."""

    def __init__(
        self,
        imports: import_stack.ImportStack,
        recorder: recorder.Recorder,
        environment: ModuleType,
        *,
        forks: bool,
        exempt: frozenset[str],
    ) -> None:
        """``forks``: this process is to be forked, so its threads count.

        ``exempt``: modules that are imported in any case: while one is on the stack, nothing is recorded.
        """
        self._imports, self._recorder, self._environment = imports, recorder, environment
        self._forks, self._exempt = forks, exempt
        self._status_fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        self._known_fds = _list_fds()
        self._new_fds: dict[str, tuple[str, tuple[str, ...]]] = {}  # by descriptor: its path, and the import stack
        self._filters: list[list[Any]] = []  # at the start of each module on the stack
        self._set_in_native_code = set[bytes]()
        self._pid = os.getpid()
        self.accept_changes()

    def accept_changes(self) -> None:
        """Record no change that was made so far."""
        self._state = self._capture()

    def on_module_start(self) -> None:
        self._filters.append(_list_filters())
        if self._exempt.isdisjoint(self._imports.modules) and os.getpid() == self._pid:
            self._compare()

    def on_module_end(self, name: str) -> None:
        """Called when a module was executed, while it is still on the stack."""
        filters = self._filters.pop()
        if not self._exempt.isdisjoint(self._imports.modules[:-1]) or os.getpid() != self._pid:
            return
        if str(getattr(sys.modules.get(name), "__file__", "")).endswith(".so"):
            self._recorder.may_have_new_maps = True
        if name == "multiprocessing.synchronize":
            self._wrap_semaphores()
        self._recorder.on_module_end(name)
        self._compare(name)
        self._compare_filters(filters)
        is_outermost = len(self._imports.modules) == 1
        self._record_native_reads()
        if self._recorder.may_have_new_maps or is_outermost:
            self._record_native_changes()
        self._recorder.record_shared_memory()
        if is_outermost:
            self._record_open_files()

    def _compare(self, executed: str = "") -> None:
        """Record what has changed since the last call; ``executed`` is the module that has just ended."""
        state, before = self._capture(executed), self._state
        self._state = state
        if self._imports.modules:
            for name, value in state.items():
                if name in before and value != before[name]:
                    self._record_change(name, before[name], value)
            for fd in _list_fds() - self._known_fds:
                if path := _read_fd_path(fd):
                    self._new_fds.setdefault(fd, (path, tuple(self._imports.modules)))

    def _record_change(self, name: str, before: Any, now: Any) -> None:
        if name == "Threads":
            if self._forks and now > before:
                self._check_threads(before)
        elif name == "warnings.filters":  # an import may change these, as long as they are the same at the end
            self._recorder.record_change(name)
        elif name == "finalizers":
            for function in sorted({each for number, each in now.items() if number not in before}):
                self._recorder.record(f"registers {function} to run at exit")
        elif name == "sys.meta_path" and now[: len(before)] == before:
            self._recorder.record_change(name)  # appended, for names that no other finder knows, as six does
        else:
            self._recorder.record(_DESCRIPTIONS.get(name, f"changes {name}"))

    def _check_threads(self, before: int) -> None:
        """Fork, and count again: some libraries end their threads before a fork, and restart them later (OpenBLAS)."""
        self._recorder.is_paused = True
        pid = os.fork()
        self._recorder.is_paused = False
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        deadline = time.monotonic() + _THREAD_END_TIMEOUT_S
        while (state := self._capture())["Threads"] > before and time.monotonic() < deadline:
            time.sleep(0.01)
        self._state = state
        if state["Threads"] > before:
            self._recorder.record("starts a thread")

    def _compare_filters(self, before: list[Any]) -> None:
        """Record changes of warning filters that a program may set too: those that are not for one library."""
        now = _list_filters()
        added = [each for each in now if not any(each is other for other in before)]
        kept = [each for each in now if any(each is other for other in before)]
        if not all(map(_is_narrow, added)) or len(kept) < len(before):
            self._recorder.record("changes the warning filters")

    def _record_native_reads(self) -> None:
        for name in self._environment.take_native_reads():
            self._recorder.on_native_variable_read(name)

    def _record_native_changes(self) -> None:
        native, python = self._environment.get_native_variables(), self._environment.get_variables()
        for key in native.keys() | python.keys():
            if native.get(key) != python.get(key) and key not in self._set_in_native_code:
                self._set_in_native_code.add(key)
                self._recorder.record(f"sets {os.fsdecode(key)} in native code")

    def _record_open_files(self) -> None:
        """Record what is open after the outermost import: it stays open."""
        for fd, (path, stack) in self._new_fds.items():
            if _read_fd_path(fd) == path:
                self._known_fds.add(fd)
                self._recorder.record(f"leaves {path} open", stack)
        self._new_fds.clear()

    def _capture(self, executed: str = "") -> dict[str, Any]:
        lines = os.pread(self._status_fd, 4096, 0).decode().splitlines()
        status = dict(line.split(":\t", 1) for line in lines)
        state = {
            **{name: int(status[name], 16) & ~_LIBC_SIGNALS for name in ("SigBlk", "SigIgn", "SigCgt")},
            "Threads": int(status["Threads"]),
            "the umask": status["Umask"],
            "signal handlers": tuple(map(signal.getsignal, _SIGNALS)),
            "alarms": tuple(signal.getitimer(number)[0] > 0 for number in _TIMERS),
            "builtins": tuple((name, id(value)) for name, value in builtins.__dict__.items() if name != "_"),
            "sys.excepthook": sys.excepthook,
            "sys.stdout": sys.stdout,
            "sys.stderr": sys.stderr,
            "sys.path": tuple(sys.path),
            "sys.meta_path": tuple(map(id, sys.meta_path)),
            "the locale": _locale.setlocale(_locale.LC_ALL),
            "the time zone": time.tzname,
            "the recursion limit": sys.getrecursionlimit(),
            "the length limit of integers": getattr(sys, "get_int_max_str_digits", int)(),
            "garbage collection": (gc.isenabled(), gc.get_threshold(), tuple(gc.callbacks)),
            "how libraries are loaded": sys.getdlopenflags(),
            "the priority": os.getpriority(os.PRIO_PROCESS, 0),
            "the CPUs it may use": len(os.sched_getaffinity(0)),
            "the working directory": os.getcwd(),
        }
        for module_name, (name, read) in _MODULE_STATES.items():
            module = sys.modules.get(module_name)
            if module is not None and (module_name == executed or module_name not in self._imports.modules):
                try:
                    state[name] = read(module)
                except AttributeError:  # it is still being imported
                    pass
        state["output"] = _count_output()
        return state

    def _wrap_semaphores(self) -> None:
        synchronize: Any = sys.modules["multiprocessing.synchronize"]
        init = synchronize.SemLock.__init__

        def wrapped_init(lock: Any, *args: Any, **kwargs: Any) -> None:
            self._recorder.record("makes a lock that forks share")
            init(lock, *args, **kwargs)

        synchronize.SemLock.__init__ = wrapped_init


def _count_output() -> tuple[int, ...]:
    """Bytes that were printed to stdout and stderr, which are files unless a perturbation makes them a terminal."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    return tuple(os.fstat(fd).st_size for fd in (1, 2))


def _list_fds() -> set[str]:
    folder = os.open("/proc/self/fd", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return set(os.listdir(folder)) - {str(folder)}
    finally:
        os.close(folder)


def _read_fd_path(fd: str) -> str:
    """The path of an open descriptor; "" if it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _list_filters() -> list[Any]:
    return list(getattr(sys.modules.get("warnings"), "filters", ()))


def _is_narrow(warning_filter: Any) -> bool:
    """Whether a filter is for warnings of some library alone, so that a program's own are shown as before."""
    _, message, category, module, _ = warning_filter
    return message is not None or module is not None or category.__module__ != "builtins"


def _read_numpy_random(numpy: Any) -> object:
    state = numpy.get_state()
    return hash(state[1].tobytes()), state[2:]


def _read_logging(logging: Any) -> object:
    root = logging.root
    levels = (root.level, root.manager.disable, tuple(map(id, root.handlers)))
    return levels, logging.getLoggerClass(), logging.getLogRecordFactory(), logging.raiseExceptions


def _read_decimal(decimal: Any) -> object:
    contexts = decimal.getcontext(), decimal.DefaultContext
    return [(each.prec, each.rounding, each.Emin, each.Emax, dict(each.traps)) for each in contexts]


def _read_finalizers(weakref: Any) -> dict[int, str]:
    infos = {id(info): info.func for info in weakref.finalize._registry.values() if info.atexit}
    return {number: f"{each.__module__}.{each.__qualname__}" for number, each in infos.items()}


_MODULE_STATES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "random": ("random", lambda random: hash(random.getstate())),
    "numpy.random": ("numpy.random", _read_numpy_random),
    "torch": ("torch.random", lambda torch: hash(tuple(torch.default_generator.get_state().tolist()))),
    "logging": ("logging", _read_logging),
    "warnings": ("warnings.filters", lambda warnings: tuple(map(id, warnings.filters))),
    "weakref": ("finalizers", _read_finalizers),
    "decimal": ("decimal's context", _read_decimal),
    "multiprocessing.context": (
        "how multiprocessing starts",
        lambda context: getattr(context._default_context._actual_context, "_name", None),
    ),
}
"""State of the process that a module has, once it is loaded: its name, and the function that reads it."""
