"""How a rank ends: an exception shown and recorded, threads joined, the user's objects dropped, the output flushed.

Part of the worker (``rank/worker.py``) and bound by its rules: no import that a file of the user's could stand in for,
no name left behind. What is shown and in which order is the interpreter's own (Python/pythonrun.c, pylifecycle.c).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]  # signal without its enums
import os
import sys
import time
from _thread import get_ident
from _weakref import ref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, NoReturn

    from ddplaunch.rank.messages import PythonJob

EXIT_FLUSH_FAILED = 120  # the interpreter's own where the output cannot be flushed (Python/pythonrun.c, Py_Exit)
_MAX_TEXT_CHARS = 1 << 19  # characters of a message or traceback that are recorded
_OWN_FILE_NAMES = (
    "allocations.py",
    "answers.py",
    "breakpoints.py",
    "debugger.py",
    "ending.py",
    "in_flight.py",
    "sampler.py",
    "terminal.py",
    "torch_state.py",
    "worker.py",
    "zygote.py",
)
_INTERNAL_FILES = (
    *(os.path.join(os.path.dirname(__file__), name) for name in _OWN_FILE_NAMES),
    *(
        os.path.join(os.path.dirname(os.path.dirname(__file__)), "python", name)
        for name in ("body.py", "magic.py", "ranks.py")
    ),
)
_Module = type(sys)


class TargetError(Exception):
    """What the user asked for cannot be; found only now that their code or torch could be asked."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def exit_code(code: object) -> int:
    """What ``sys.exit(code)`` means to Python: None is 0, a number itself, anything else is printed and 1."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    for text in (code, "\n"):
        try:
            print(text, end="", file=sys.stderr)
        except Exception:
            pass  # as Python does, with a __str__ that fails or a closed stderr
    return 1


def to_exit_status(code: int) -> int:
    """The part of an exit code that a parent sees; one that does not fit a C long counts as -1 (Python/pythonrun.c)."""
    return (code if -(1 << 63) <= code < 1 << 63 else -1) & 0xFF


def report_exception(job: PythonJob, error: BaseException) -> None:
    """Show an uncaught exception as Python would, without our frames, and record it for the launcher's report."""
    _strip_internal_frames(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    write_error_file(job, error, _format_exception(error))
    if isinstance(error, KeyboardInterrupt) and job["facts"]["world_size"] > 1 and _is_default_hook(sys.excepthook):
        return _print_interrupt_location(
            error
        )  # Ctrl-C interrupts all ranks: a traceback of each would hide what is said of them
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as broken:
        print("Error in sys.excepthook:", file=sys.stderr)
        _print_exception(_strip_internal_frames(broken))
        print("\nOriginal exception was:", file=sys.stderr)
        _print_exception(error)


def _is_default_hook(hook: Any) -> bool:
    """Whether it is Python's, or torch's around that: ``init_process_group`` sets one, for a prefix."""
    torchs = getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d"
    inner = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()] if torchs else [hook]
    return any(each is sys.__excepthook__ for each in inner)


def _print_interrupt_location(error: BaseException) -> None:
    """Say in one line at which of the user's lines it came: "KeyboardInterrupt: step at train.py:31"."""
    where, here = "", os.getcwd() + os.sep
    for each in (error.__context__, error):  # it may come when the program has just ended of another
        trace = each.__traceback__ if each is not None else None
        while trace is not None:
            code = trace.tb_frame.f_code
            if is_user_file(code.co_filename):
                name = "" if code.co_name == "<module>" else f"{code.co_name} at "
                where = f": {name}{code.co_filename.removeprefix(here)}:{trace.tb_lineno}"
            trace = trace.tb_next
    try:
        print(f"{type(error).__name__}{where}", file=sys.stderr)
    except Exception:
        pass


def _print_exception(error: BaseException) -> None:
    sys.__excepthook__(type(error), error, error.__traceback__)


def _strip_internal_frames(error: BaseException) -> BaseException:
    """Take off a traceback what stands before the user's frames: ours, and importlib's where we loaded their module.

    Where there are no others they stay: without them nothing would show where the exception came from, unless it is of
    a kind, or from a place, whose message says so.
    """
    trace, name = error.__traceback__, ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name not in _INTERNAL_FILES and not name.startswith("<frozen importlib"):
            break
        trace = trace.tb_next
    from_launch = name.endswith(os.path.join("python", "ranks.py"))
    if trace is None and not from_launch and not isinstance(error, (SyntaxError, ImportError, KeyboardInterrupt)):
        return error
    return error.with_traceback(trace)


class _StderrTee:
    """Stands in for ``sys.stderr``: keeps what this thread writes, passes on what others write meanwhile."""

    def __init__(self, stream: Any) -> None:

        self._stream, self._ident, self._thread = stream, get_ident, get_ident()
        self.heard: list[str] = []

    def write(self, text: str) -> None:
        if self._ident() == self._thread:
            self.heard.append(text)
        elif self._stream is not None:
            self._stream.write(text)

    def flush(self) -> None:
        pass


def _format_exception(error: BaseException) -> str:
    """Return an exception's traceback in Python's own words; the traceback module would import a dozen others."""
    stderr = sys.stderr
    sys.stderr = listener = _StderrTee(stderr)
    try:
        _print_exception(error)
    finally:
        sys.stderr = stderr
    return "".join(listener.heard)


def write_error_file(job: PythonJob, error: BaseException, text: str) -> None:
    """Write the error file unless ``@record`` has: torchelastic's format, {"message": {"message", "extraInfo"}}."""
    path = job["error_file"]
    if not path or os.path.lexists(path):
        return

    try:
        message = str(error)
    except Exception:
        message = "<exception str() failed>"
    message, moment = _truncate(message), time.time_ns()
    info: dict[str, object] = {"py_callstack": _truncate(text), "timestamp": str(moment // 10**9), "time_ns": moment}
    if isinstance(error, TargetError):
        info["refused"] = {"hint": error.hint}
    else:
        name = type(error).__name__
        message = f"{name}: {message}" if message else name
        if name == "BdbQuit" and "Caught BdbQuit in DataLoader worker" in message:  # torch/_utils.py, ExceptionWrapper
            info["hint"] = "a DataLoader worker cannot be stopped in a debugger: use num_workers=0"
        elif name == "BdbQuit" and job["facts"]["world_size"] > 1 and not os.isatty(0):
            other = f"pdb, ipdb, pudb and IPython wait for a person; --stdin {job['rank']} gives others the terminal"
            waits = "with --debug the rank waits at its breakpoint for `ddplaunch debug`"
            info["hint"] = other if job["debugger"] else waits
        elif name == "EOFError" and job["facts"]["world_size"] > 1:
            info["hint"] = f"stdin is empty in this rank; with --stdin {job['rank']} it reads yours"
        elif name == "ModuleNotFoundError" and (hint := _other_environment()):
            info["hint"] = hint
        elif isinstance(error, KeyboardInterrupt):
            info["interrupt"] = 1
        info["collectives"] = _count_collectives()
    try:
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)  # follows no link
        with open(made, "w", encoding="ascii") as file:
            file.write(_to_json({"message": {"message": message, "extraInfo": info}}))
    except OSError:
        pass  # a full disk: the report falls back on what the rank printed


def _other_environment() -> str:
    """Which Python another environment has that is active in the shell; "" where ranks run in that."""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        folder = os.environ.get(variable)
        if not folder:
            continue
        if os.path.realpath(folder) == os.path.realpath(sys.prefix):
            return ""
        python = os.path.join(folder, "bin", "python")
        if os.path.exists(python):
            return f"ranks run on {sys.executable}, and ${variable} has another Python: {python} -m ddplaunch run …"
    return ""


def _count_collectives() -> int | None:
    """How many collectives this rank has entered in all its process groups; None where that is not known."""
    try:
        module = sys.modules["torch.distributed.distributed_c10d"]
        return sum([int(group._get_sequence_number_for_group()) for group in module._world.pg_names]) or None
    except Exception:
        return None


def _truncate(text: str) -> str:
    """The launcher keeps less than this, and would not read a file without end."""
    return (
        text if len(text) <= _MAX_TEXT_CHARS else text[: _MAX_TEXT_CHARS // 2] + "\n…\n" + text[-_MAX_TEXT_CHARS // 2 :]
    )


def _to_json(value: object) -> str:
    """A value as JSON, all of it ASCII; a json.py may be the user's."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_to_json(key)}: {_to_json(inner)}" for key, inner in value.items()) + "}"
    if not isinstance(value, str):
        return "null" if value is None else str(value)
    units = memoryview(value.encode(f"utf-16-{sys.byteorder[0]}e", "surrogatepass")).cast("H")
    plain = "".join(chr(unit) if 31 < unit < 127 and unit not in b'"\\' else f"\\u{unit:04x}" for unit in units)
    return f'"{plain}"'


def join_threads() -> None:
    threading = sys.modules.get("threading")
    if threading is not None:
        try:
            threading._shutdown()
        except BaseException as error:
            report_unraisable(error, "on threading shutdown", threading)


def finalize_user_modules(initial_modules: frozenset[str]) -> bool:
    """Drop what the program made, so that ``__del__`` runs and files are flushed; return whether the output could be.

    In the interpreter's own order (Python/pylifecycle.c: Py_FinalizeEx, finalize_modules): first everything that only
    the user's modules hold, so that ``__del__`` sees its globals whole, then the globals of those that live on.
    """
    import gc

    broken = flush_stream(sys.stdout)
    if broken is not None:
        report_unraisable(broken, "on flushing sys.stdout", sys.stdout)
    flushed = broken is None and flush_stream(sys.stderr) is None
    for number in _signal.valid_signals():
        if callable(_signal.getsignal(number)):
            _signal.signal(number, _signal.SIG_DFL)
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    left = []
    users = [  # all are found before the first goes: a package in a namespace package asks that for its path
        (name, module)
        for name, module in list(sys.modules.items())
        if isinstance(module, _Module)
        and (name == "__main__" or (name not in initial_modules and _is_user_module(module)))
    ]
    while users:
        name, module = users.pop(0)
        # A module may go and its globals stay, held by a function somewhere: the mark in them tells.
        mark = module.__dict__["__end__"] = _Module(name)
        left.append((ref(module), ref(mark)))
        sys.modules[name] = None  # type: ignore[assignment]
    module = mark = None  # type: ignore[assignment]
    gc.collect()
    cleared = False
    for module_left, mark_left in reversed(left):
        module, mark = module_left(), mark_left()  # type: ignore[assignment]
        if mark is not None:
            cleared = True
            for names in gc.get_referrers(mark) if module is None else [module.__dict__]:
                if type(names) is dict:
                    _clear_globals(names)
    module = mark = names = None  # type: ignore[assignment]
    if cleared:
        gc.collect()
    for stream in (sys.stdout, sys.stderr):
        flush_stream(stream)
    return flushed


def _is_user_module(module: ModuleType) -> bool:
    """Whether a module is the user's own code, and not Python's or installed: that has nothing to say at the end."""
    try:
        place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    except Exception:  # a path that is computed, by a parent that the program has deleted or by code of anybody's
        return False
    return isinstance(place, str) and is_user_file(place)


def is_user_file(place: str) -> bool:
    return (
        not place.startswith((os.path.dirname(os.__file__) + os.sep, "<frozen ", *_INTERNAL_FILES))
        and f"-packages{os.sep}" not in place
    )


def _clear_globals(names: dict[str, object]) -> None:
    """Set a module's globals to None, private names first (Objects/moduleobject.c, _PyModule_ClearDict)."""
    for private in (True, False):
        for name in list(names):
            if name != "__builtins__" and (name[:1] == "_" and name[:2] != "__") is private:
                names[name] = None


def flush_stream(stream: Any) -> BaseException | None:
    """Flush a stream unless it is closed; return what prevented that."""
    try:
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
    except BaseException as error:
        return error.with_traceback(None)
    return None


def report_unraisable(error: BaseException, occasion: str, source: object) -> None:
    """Tell of an exception that nobody can handle any more, in the interpreter's words."""
    try:
        where = f"{occasion}:" if sys.version_info >= (3, 13) else f"in: {source!r}"
        print("Exception ignored", where, file=sys.stderr)
        _print_exception(_strip_internal_frames(error))
    except Exception:
        pass  # a stderr that is broken too


def exit_by_sigint_later() -> NoReturn:
    """Have the interpreter end, and then by SIGINT, as for any KeyboardInterrupt; we have shown it already."""
    hook = sys.excepthook

    def pass_over(*ignored: object) -> None:
        sys.excepthook = hook

    sys.excepthook = pass_over
    raise KeyboardInterrupt


def die_by_sigint() -> NoReturn:
    """End by SIGINT itself, as Python does, so that our parent can tell."""
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    os.kill(os.getpid(), _signal.SIGINT)
    os._exit(130)
