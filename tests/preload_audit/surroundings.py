"""Watches the process state that all modules share during imports, inside an audit's interpreters.

Standard library only; run from its path. A look costs some 0.1 ms, and there is one whenever another module begins or
goes on to be executed, so that what has changed is known to be the doing of those on the stack.
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

    from tests.preload_audit import findings, import_stack

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SIGNALS = ("SigBlk", "SigIgn", "SigCgt")
_LIBC = 3 << 31  # signals 32 and 33, which the C library handles from the first thread on
_CONTRACT = frozenset({"torch"})
_THREAD_END_TIMEOUT_S = 1.0  # for the kernel to end a thread that was joined


class Surroundings:
    def __init__(
        self,
        imports: import_stack.ImportStack,
        found: findings.Findings,
        variables: ModuleType,
        *,
        forks: bool,
        exempt: frozenset[str] = _CONTRACT,
    ) -> None:
        """``forks``: this process is to be forked, so its threads count.

        While one of ``exempt`` is on the stack nothing is looked at: it is imported in any case.
        """
        self._imports, self._found, self._forks, self._exempt = imports, found, forks, exempt
        self._variables = variables
        self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        self._numbers = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
        self._descriptors = self._fds()
        self._filters: list[list[Any]] = []  # as they were when each module on the stack began
        self._set_in_native_code = set[bytes]()
        self._suspects: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._pid = os.getpid()
        self._last = self._look()

    def accept(self) -> None:
        """Blame no module for what has changed so far."""
        self._last = self._look()

    def begins(self) -> None:
        """Another module begins."""
        self._filters.append(_filters())
        if self._exempt.isdisjoint(self._imports.modules) and os.getpid() == self._pid:
            self._compare()

    def _compare(self, done: str = "") -> None:
        """What differs from what was before is the doing of the modules on the stack; ``done`` was just executed."""
        now, last = self._look(done), self._last
        self._last = now
        if not self._imports.modules:
            return
        for aspect, value in now.items():
            before = last.get(aspect, value)
            if value != before:
                self._differs(aspect, before, value)
        self._look_at_descriptors()

    def finished(self, name: str) -> None:
        """A module is done, and still on the stack."""
        before = self._filters.pop()
        if not self._exempt.isdisjoint(self._imports.modules[:-1]) or os.getpid() != self._pid:
            return
        if str(getattr(sys.modules.get(name), "__file__", "")).endswith(".so"):
            self._found.maps = True
        if name == "multiprocessing.synchronize":
            self._watch_semaphores()
        self._found.finished(name)
        self._compare(name)
        self._look_at_filters(before)
        self._look_at_native_code(self._found.maps or len(self._imports.modules) == 1)
        self._found.look_at_maps()
        if len(self._imports.modules) == 1:
            self._convict()

    def _look_at_native_code(self, thoroughly: bool) -> None:
        """Note which variables it has asked for, and which it has set."""
        for name in self._variables.asked():
            self._found.see_in_native_code(name)
        if not thoroughly:
            return
        theirs, ours = self._variables.native_data(), self._variables.data()
        for key in theirs.keys() | ours.keys():
            if theirs.get(key) != ours.get(key) and key not in self._set_in_native_code:
                self._set_in_native_code.add(key)
                self._found.note(f"sets {os.fsdecode(key)} in native code")

    def _look_at_filters(self, before: list[Any]) -> None:
        """Note changes in what a program's own lines choose too: how warnings of no certain library are shown."""
        now = _filters()
        added = [each for each in now if not any(each is there for there in before)]
        kept = [each for each in now if any(each is there for there in before)]
        if not all(map(_is_narrow, added)) or len(kept) < len(before):
            self._found.note("changes the warning filters")

    def _differs(self, aspect: str, before: Any, now: Any) -> None:
        if aspect == "Threads":
            if self._forks and now > before:
                self._probe(before)
        elif aspect in _COMPARED:
            self._found.change(aspect)
        elif aspect == "finalizers":
            for name in sorted({each for number, each in now.items() if number not in before}):
                self._found.note(f"registers {name} to run at exit")
        elif aspect == "sys.meta_path":
            if now[: len(before)] == before:  # appended, for names that no other finder knows, as six does
                self._found.change(aspect)
            else:
                self._found.note("changes sys.meta_path")
        elif aspect in _WORDS:
            self._found.note(_WORDS[aspect])
        else:
            self._found.note(f"changes {aspect}")

    def _probe(self, before: int) -> None:
        """Some libraries stop their threads before a fork, and start them again when they compute (OpenBLAS)."""
        self._found.quiet = True
        pid = os.fork()
        self._found.quiet = False
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        deadline = time.monotonic() + _THREAD_END_TIMEOUT_S
        while (last := self._look())["Threads"] > before and time.monotonic() < deadline:
            time.sleep(0.01)
        self._last = last
        if last["Threads"] > before:
            self._found.note("starts a thread")

    def _look(self, done: str = "") -> dict[str, Any]:
        lines = os.pread(self._status, 4096, 0).decode().splitlines()
        status = dict(line.split(":\t", 1) for line in lines)
        look: dict[str, Any] = {name: int(status[name], 16) & ~_LIBC for name in _SIGNALS}
        look["Threads"] = int(status["Threads"])
        look["the umask"] = status["Umask"]
        look["signal handlers"] = tuple(map(signal.getsignal, self._numbers))
        look["alarms"] = tuple(signal.getitimer(number)[0] > 0 for number in _TIMERS)
        look["builtins"] = tuple((name, id(value)) for name, value in builtins.__dict__.items() if name != "_")
        look["sys.excepthook"] = sys.excepthook
        look["sys.stdout"], look["sys.stderr"] = sys.stdout, sys.stderr
        look["sys.path"] = tuple(sys.path)
        look["sys.meta_path"] = tuple(map(id, sys.meta_path))
        look["the locale"] = _locale.setlocale(_locale.LC_ALL)
        look["the time zone"] = time.tzname
        look["the recursion limit"] = sys.getrecursionlimit()
        look["the length limit of integers"] = getattr(sys, "get_int_max_str_digits", int)()
        look["garbage collection"] = (gc.isenabled(), gc.get_threshold(), tuple(gc.callbacks))
        look["how libraries are loaded"] = sys.getdlopenflags()
        look["the priority"] = os.getpriority(os.PRIO_PROCESS, 0)
        look["the CPUs it may use"] = len(os.sched_getaffinity(0))
        look["the working directory"] = os.getcwd()
        for name, (what, read) in _OF_MODULES.items():
            module = sys.modules.get(name)
            if module is not None and (name == done or name not in self._imports.modules):
                try:
                    look[what] = read(module)
                except AttributeError:  # it is still being imported
                    pass
        look["output"] = self._printed()
        return look

    def _printed(self) -> tuple[int, ...]:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass
        return tuple(os.fstat(fd).st_size for fd in (1, 2))  # of files, so no terminals

    def _fds(self) -> set[str]:
        folder = os.open("/proc/self/fd", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return set(os.listdir(folder)) - {str(folder)}
        finally:
            os.close(folder)

    def _look_at_descriptors(self) -> None:
        for fd in self._fds() - self._descriptors:
            if target := _target(fd):
                self._suspects.setdefault(fd, (target, tuple(self._imports.modules)))

    def _convict(self) -> None:
        """What is still open when the outermost import is done stays open."""
        for fd, (target, stack) in self._suspects.items():
            if _target(fd) == target:
                self._descriptors.add(fd)
                self._found.note(f"leaves {target} open", stack)
        self._suspects.clear()

    def _watch_semaphores(self) -> None:
        synchronize: Any = sys.modules["multiprocessing.synchronize"]
        make = synchronize.SemLock.__init__

        def making(lock: Any, *args: Any, **kwargs: Any) -> None:
            self._found.note("makes a lock that forks share")
            make(lock, *args, **kwargs)

        synchronize.SemLock.__init__ = making


_COMPARED = frozenset({"warnings.filters"})
"""What an import may change, as long as it is the same at the end."""

_WORDS = {
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


def _filters() -> list[Any]:
    return list(getattr(sys.modules.get("warnings"), "filters", ()))


def _is_narrow(warning_filter: Any) -> bool:
    """Whether a filter is for warnings of some library alone: wherever it is put, a program's own are shown as ever."""
    _, message, category, module, _ = warning_filter
    return message is not None or module is not None or category.__module__ != "builtins"


def _target(fd: str) -> str:
    """What a descriptor is open for; "" if it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _numpy(numpy: Any) -> object:
    state = numpy.get_state()
    return hash(state[1].tobytes()), state[2:]


def _logging(logging: Any) -> object:
    root = logging.root
    levels = (root.level, root.manager.disable, tuple(map(id, root.handlers)))
    return levels, logging.getLoggerClass(), logging.getLogRecordFactory(), logging.raiseExceptions


def _decimal(decimal: Any) -> object:
    contexts = decimal.getcontext(), decimal.DefaultContext
    return [(each.prec, each.rounding, each.Emin, each.Emax, dict(each.traps)) for each in contexts]


def _finalizers(weakref: Any) -> dict[int, str]:
    infos = {id(info): info.func for info in weakref.finalize._registry.values() if info.atexit}
    return {number: f"{each.__module__}.{each.__qualname__}" for number, each in infos.items()}


_OF_MODULES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "random": ("random", lambda random: hash(random.getstate())),
    "numpy.random": ("numpy.random", _numpy),
    "torch": ("torch.random", lambda torch: hash(tuple(torch.default_generator.get_state().tolist()))),
    "logging": ("logging", _logging),
    "warnings": ("warnings.filters", lambda warnings: tuple(map(id, warnings.filters))),
    "weakref": ("finalizers", _finalizers),
    "decimal": ("decimal's context", _decimal),
    "multiprocessing.context": (
        "how multiprocessing starts",
        lambda context: getattr(context._default_context._actual_context, "_name", None),
    ),
}
"""What a module has that is state of the process, once it is loaded: what that is called, and how it is read."""
