"""The end of a rank: show and record an exception, join threads, drop the user's objects, flush the output.

Bound by the rules of ``rank_runner.py``: no import that a user's file could shadow, no name left behind. Output and
order are those of the interpreter (Python/pythonrun.c, pylifecycle.c). Whatever the program has replaced, and whatever
its exception overrides, the exception is shown and recorded: by the functions and descriptors that are kept here.
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

    from ddplaunch.core.rank.zygote_messages import PythonJob

EXIT_FLUSH_FAILED = 120  # as Python exits if it cannot flush the output (Python/pythonrun.c, Py_Exit)
_MAX_TEXT_CHARS = 1 << 19  # of a recorded message or traceback
_PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_Module, _Function = type(sys), type(lambda: None)
_display_unraisable = sys.__unraisablehook__
_display, _open, _write, _close, _time_ns = sys.__excepthook__, os.open, os.write, os.close, time.time_ns
_name_of, trace_of, _context_of = (
    owner.__dict__[name].__get__
    for owner, name in ((type, "__name__"), (BaseException, "__traceback__"), (BaseException, "__context__"))
)


class TargetError(Exception):
    """A usage error that shows only in the rank, after the user's code or torch was imported."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def exit_code(error: BaseException) -> int:
    """The exit code of ``sys.exit(code)``, as in Python: 0 for None, an integer as it is; else 1, and it is printed."""
    try:
        code: object = error.code  # type: ignore[attr-defined]
    except BaseException:
        code = error
    if code is None:
        return 0
    if issubclass(type(code), int):
        return int.__int__(code)  # type: ignore[arg-type]
    _print(code, end="")
    _print()
    return 1


def _print(text: object = "", end: str = "\n") -> None:
    """Print to stderr; nothing if ``__str__`` raises or stderr is closed, as Python does it."""
    try:
        sys.stderr.write(str(text) + end)
    except BaseException:
        pass


def to_exit_status(code: int) -> int:
    """Return the low 8 bits of an exit code, as a parent gets them; a code too large for a C long counts as -1."""
    return (code if -(1 << 63) <= code < 1 << 63 else -1) & 0xFF


def type_name(error: BaseException) -> str:
    """The name of an exception's class, whatever its metaclass answers."""
    name: str = _name_of(type(error))
    return name


def report_exception(job: PythonJob, error: BaseException) -> None:
    """Print an uncaught exception as Python would, without ddplaunch's frames, and record it for the failure report.

    Python's own hook is called before the exception is recorded: it shows the exception whatever happens. A hook of
    the program is called after that: it may end the process, like MPI's Abort.
    """
    moment = _time_ns()
    _strip_internal_frames(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace_of(error)
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    hook = getattr(sys, "excepthook", _Module)
    is_default = _is_default_excepthook(hook)
    if is_default and issubclass(type(error), KeyboardInterrupt) and job["facts"]["world_size"] > 1:
        _print_interrupt_location(error)  # Ctrl-C interrupts all ranks: their tracebacks would hide the report
    elif is_default:
        _call_excepthook(hook, error)
    write_error_file(job, error, _format_exception(error), moment)
    if not is_default:
        _call_excepthook(hook, error)


def _call_excepthook(hook: Any, error: BaseException) -> None:
    """Call an excepthook; the module type stands for one that was deleted."""
    if hook is _Module:
        _print("sys.excepthook is missing")
        return _print_exception(error)
    try:
        hook(type(error), error, trace_of(error))
    except BaseException as broken:
        if issubclass(type(broken), SystemExit):
            raise
        _print("Error in sys.excepthook:")
        _print_exception(_strip_internal_frames(broken, entirely=True))
        _print("\nOriginal exception was:")
        _print_exception(error)


def report_bug(what: str, error: Exception) -> None:
    """Print an exception in ddplaunch's own code; the program continues."""
    text = f"bug in ddplaunch: {what} and is left out, the job continues:\n{_format_exception(error)}"
    _write(2, text.encode(errors="backslashreplace"))


def _is_default_excepthook(hook: Any) -> bool:
    """Whether an excepthook is Python's, or torch's wrapper of it: ``init_process_group`` sets one, for a prefix."""
    if type(hook) is _Function and hook.__module__ == "torch.distributed.distributed_c10d":
        return any(cell.cell_contents is _display for cell in hook.__closure__ or ())
    return hook is _display


def _print_interrupt_location(error: BaseException) -> None:
    """Print one line with the innermost line of the user's code: "KeyboardInterrupt: step at train.py:31"."""
    where = ""
    for exception in (_context_of(error), error):  # it may arrive just after another exception has ended the program
        trace = trace_of(exception) if exception is not None else None
        while trace is not None:
            code = trace.tb_frame.f_code
            if is_user_file(code.co_filename):
                name = "" if code.co_name == "<module>" else f"{code.co_name} at "
                where = f": {name}{relative_path(code.co_filename)}:{trace.tb_lineno}"
            trace = trace.tb_next
    _print(type_name(error) + where)


def relative_path(path: str) -> str:
    """A file's path relative to the current folder, if it is in there."""
    return path.removeprefix(current_folder() + os.sep)


def current_folder() -> str:
    """The path of the current folder; the one that it had, if it was removed meanwhile."""
    try:
        return os.getcwd()
    except Exception:
        pass
    try:
        return os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
    except Exception:
        return "/"


def _print_exception(error: BaseException) -> None:
    try:
        _display(type(error), error, trace_of(error))
    except BaseException:
        pass  # the object that has replaced stderr raises


def _strip_internal_frames(error: BaseException, *, entirely: bool = False) -> BaseException:
    """Remove the frames before the user's from a traceback: ddplaunch's, and importlib's from loading their module.

    If there are no other frames, they stay, because nothing else would show where the exception was raised. They are
    removed with ``entirely``, and where the message is enough: for some types, and from a module with ``HIDES_FRAMES``.
    """
    trace, hides = trace_of(error), entirely
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        hides = entirely or "HIDES_FRAMES" in trace.tb_frame.f_globals
        if not is_internal_file(name) and not name.startswith("<frozen importlib"):
            break
        trace = trace.tb_next
    if trace is not None or hides or issubclass(type(error), (SyntaxError, ImportError, KeyboardInterrupt)):
        BaseException.with_traceback(error, trace)
    return error


class _StderrCollector:
    """Replaces ``sys.stderr``: collects what this thread writes, passes on the output of other threads."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._ident, self._thread = stream, get_ident, get_ident()
        self.collected: list[str] = []

    def write(self, text: str) -> None:
        if self._ident() == self._thread:
            self.collected.append(text)
        elif self._stream is not None:
            self._stream.write(text)

    def flush(self) -> None:
        pass


def _format_exception(error: BaseException) -> str:
    """Format an exception with the interpreter's own printer; the traceback module would import a dozen others."""
    stderr = getattr(sys, "stderr", None)
    sys.stderr = tee = _StderrCollector(stderr)
    try:
        _print_exception(error)
    finally:
        sys.stderr = stderr
    return "".join(tee.collected)


def write_error_file(job: PythonJob, error: BaseException, text: str, moment: int = 0) -> None:
    """Write the error file, unless ``@record`` has, in torchelastic's format: {"message": {"message", "extraInfo"}}."""
    path = job["error_file"]
    if not path:
        return
    try:
        content = to_json({"message": _describe_error(job, error, text, moment or _time_ns())}).encode()
        fd = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)  # follows no link
        try:
            while content:
                content = content[_write(fd, content) :]
        finally:
            _close(fd)
    except BaseException:
        pass  # there is one, or a full disk: the failure report uses the rank's output instead


def _describe_error(job: PythonJob, error: BaseException, text: str, moment: int) -> dict[str, object]:
    message = _truncate(_to_text(error))
    info: dict[str, object] = {"py_callstack": _truncate(text), "timestamp": str(moment // 10**9), "time_ns": moment}
    if type(error) is TargetError:
        info["refused"] = {"hint": error.hint}
    else:
        name = type_name(error)
        message = f"{name}: {message}" if message else name
        if name == "EOFError" and job["facts"]["world_size"] > 1:
            info["hint"] = f"stdin of this rank is empty; with --stdin {job['rank']} it reads the launcher's stdin"
        elif name == "ModuleNotFoundError" and (hint := _other_environment_hint()):
            info["hint"] = hint
        elif issubclass(type(error), KeyboardInterrupt):
            info["interrupt"] = 1
        info["collectives"] = _count_collectives()
    return {"message": message, "extraInfo": info}


def _to_text(error: BaseException) -> str:
    try:
        return str.__str__(str(error))  # of a str that overrides its methods, a plain one
    except BaseException:
        return "<exception str() failed>"


def _other_environment_hint() -> str:
    """A hint if the shell has another Python environment active than that of the ranks; otherwise ""."""
    try:
        return _describe_other_environment()
    except Exception:
        return ""  # the program has replaced os.environ


def _describe_other_environment() -> str:
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        folder = os.environ.get(variable)
        if not folder:
            continue
        if os.path.realpath(folder) == os.path.realpath(sys.prefix):
            return ""
        python = os.path.join(folder, "bin", "python")
        if os.path.exists(python):
            return f"the ranks use {sys.executable}; ${variable} has another Python: {python} -m ddplaunch run …"
    return ""


def _count_collectives() -> int | None:
    """The number of collectives that this rank has entered, in all its process groups; None if unknown."""
    try:
        module = sys.modules["torch.distributed.distributed_c10d"]
        return sum([int(group._get_sequence_number_for_group()) for group in module._world.pg_names]) or None
    except BaseException:
        return None


def _truncate(text: str) -> str:
    """Cut the middle out of a long text: the launcher keeps less than this, and reads no file of unlimited size."""
    return (
        text if len(text) <= _MAX_TEXT_CHARS else text[: _MAX_TEXT_CHARS // 2] + "\n…\n" + text[-_MAX_TEXT_CHARS // 2 :]
    )


def to_json(value: object) -> str:
    """Format a value as ASCII JSON; the json module is not used, as a user's json.py would shadow it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{to_json(key)}: {to_json(inner)}" for key, inner in value.items()) + "}"
    if not isinstance(value, str):
        return "null" if value is None else str(value)
    units = memoryview(value.encode(f"utf-16-{sys.byteorder[0]}e", "surrogatepass")).cast("H")
    plain = "".join(chr(unit) if 31 < unit < 127 and unit not in b'"\\' else f"\\u{unit:04x}" for unit in units)
    return f'"{plain}"'


def join_program_threads() -> None:
    threading = sys.modules.get("threading")
    if threading is not None:
        try:
            threading._shutdown()
        except BaseException as error:
            report_unraisable(error, "on threading shutdown", threading)


def finalize_user_modules(initial_modules: frozenset[str]) -> bool:
    """Drop the user's modules, so that ``__del__`` runs and files are flushed; return whether stdout was flushed.

    In the interpreter's order (Python/pylifecycle.c: Py_FinalizeEx, finalize_modules): first the objects that only the
    user's modules reference, so that ``__del__`` still sees all globals, then the globals of modules that live on.
    """
    import gc

    broken = flush_stream("stdout")
    if broken is not None:
        report_unraisable(broken, "on flushing sys.stdout", sys.stdout)
    flushed = broken is None and flush_stream("stderr") is None
    for number in _signal.valid_signals():
        if callable(_signal.getsignal(number)):
            _signal.signal(number, _signal.SIG_DFL)
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, name, getattr(sys, f"__{name}__", None))
    sys.excepthook, sys.unraisablehook = _display, _display_unraisable
    left = []
    users = [  # all are listed before the first is dropped: a namespace package's child asks it for its path
        (name, module)
        for name, module in list(sys.modules.items())
        if isinstance(module, _Module)
        and (name == "__main__" or (name not in initial_modules and _is_user_module(module)))
    ]
    while users:
        name, module = users.pop(0)
        # A module may be freed while a function still references its globals: the mark in them shows that.
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
    for name in ("stdout", "stderr"):
        flush_stream(name)
    return flushed


def _is_user_module(module: ModuleType) -> bool:
    """Whether a module is the user's code: modules of Python and of installed packages have nothing to finalize."""
    try:
        path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    except Exception:  # a path that is computed, by a parent that the program has deleted or by other code
        return False
    return isinstance(path, str) and is_user_file(path)


def is_internal_file(path: str) -> bool:
    """Whether a source file is part of ddplaunch that runs in ranks: it is in a folder ``rank`` of the package."""
    return path.startswith(_PACKAGE_DIR) and f"{os.sep}rank{os.sep}" in path[len(_PACKAGE_DIR) - 1 :]


def is_user_file(path: str) -> bool:
    """Whether a source file is the user's code: not Python's, not an installed package's, not ddplaunch's."""
    return (
        not path.startswith((os.path.dirname(os.__file__) + os.sep, "<frozen "))
        and not is_internal_file(path)
        and f"-packages{os.sep}" not in path
    )


def _clear_globals(names: dict[str, object]) -> None:
    """Set a module's globals to None, private names first (Objects/moduleobject.c, _PyModule_ClearDict)."""
    for private in (True, False):
        for name in list(names):
            if name != "__builtins__" and (name[:1] == "_" and name[:2] != "__") is private:
                names[name] = None


def flush_stream(name: str) -> BaseException | None:
    """Flush a stream of ``sys`` unless it is closed or deleted; return the exception if that fails."""
    stream = getattr(sys, name, None)
    try:
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
    except BaseException as error:
        return BaseException.with_traceback(error, None)
    return None


def report_unraisable(error: BaseException, occasion: str, source: object) -> None:
    """Print an exception that cannot be handled any more, with the interpreter's "Exception ignored"."""
    try:
        where = f"{occasion}:" if sys.version_info >= (3, 13) else f"in: {source!r}"
    except BaseException:
        return  # __repr__ raises
    _print(f"Exception ignored {where}")
    _print_exception(_strip_internal_frames(error))


def raise_to_exit_by_sigint() -> NoReturn:
    """Raise KeyboardInterrupt so that the interpreter exits by SIGINT, without printing the exception again."""
    hook = getattr(sys, "excepthook", _display)

    def print_nothing(*ignored: object) -> None:
        sys.excepthook = hook

    sys.excepthook = print_nothing
    raise KeyboardInterrupt


def die_by_sigint() -> NoReturn:
    """Exit by SIGINT, as Python does after a KeyboardInterrupt, so that the parent can see it."""
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    os.kill(os.getpid(), _signal.SIGINT)
    os._exit(130)
