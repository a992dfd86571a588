"""Runs the user's program in a rank, forked from the zygote or started as a fresh interpreter.

The program must not notice that it was not started as ``python train.py`` (docs/fidelity.md lists the differences). So
this file imports only modules that Python has loaded already or built in, because a user's file may have any other
name; it leaves no name behind, being run or loaded by path and never in ``sys.modules``; and below the program's stack
are only two frames of ddplaunch, ``run_program`` and its caller.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]  # signal without its enums
import faulthandler
import io
import marshal
import os
import sys
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import SourceFileLoader, SourcelessFileLoader, spec_from_file_location

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType
    from typing import Any, NoReturn

    from ddplaunch.core.rank import hidden_modules
    from ddplaunch.core.rank.zygote_messages import PythonJob, RankJob

    Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, object]]

EXIT_USAGE = 2

_STACK_CHUNK_SLOTS = 1 << 17  # of the interpreter's stack, in pointers: 1,000 calls use about a third

_Module = type(sys)

_BUILTINS = dict(sys.modules["builtins"].__dict__)
"""Built-in names for ddplaunch's functions in a rank: the program may replace ``open``, or ``print`` in other ranks."""

globals()["__builtins__"] = _BUILTINS  # the functions defined from here on keep it

_private_modules: dict[str, ModuleType] = {}  # by path; those of the zygote are its ranks' too

PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def load_private_module(path: str) -> Any:
    """Load a file of the package, as "core/rank/rank_exit", once, without adding its name to ``sys.modules``.

    The file may load others at its top: this function is a global name there.
    """
    if path not in _private_modules:
        file = os.path.join(PACKAGE_DIR, path + ".py")
        try:
            _private_modules[path] = _load(os.path.basename(path), file, {}, **_PRIVATE_NAMES)
        except (FileNotFoundError, ImportError) as error:
            what = "ddplaunch was installed anew or removed while this job ran"
            raise rank_exit.TargetError(f"{what}: {error}", "start the job again") from None
    return _private_modules[path]


_PRIVATE_NAMES = {"load_private_module": load_private_module, "__builtins__": _BUILTINS}


def preload_sides(job: RankJob) -> None:
    """Load the files of a rank's sides in the zygote, so that all its ranks share them."""
    for file, _ in job["sides"] if job["kind"] != "program" else ():
        try:
            load_private_module(file)
        except Exception:
            return  # the rank fails in the same way, and shows it


def _load(name: str, path: str, modules: dict[str, ModuleType], **names: object) -> ModuleType:
    """Load a file as module ``name``, added to ``modules`` before it runs; importlib.util is not imported."""
    spec: Any = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    module.__dict__.update(names)
    modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from ddplaunch.core.rank import gloo_teardown, inspection_endpoint, rank_exit
else:
    gloo_teardown = load_private_module("core/rank/gloo_teardown")
    inspection_endpoint = load_private_module("core/rank/inspection_endpoint")
    rank_exit = load_private_module("core/rank/rank_exit")


class RankRunner:
    """One rank from its start to its end; ``program`` is the callable to run, set by ``setup``."""

    def __init__(self, job: PythonJob, fds: dict[str, int], hidden: hidden_modules.HiddenModules | None = None) -> None:
        """``fds``: descriptors by purpose, as in ``SpawnRequest``.

        ``hidden``: the preloaded modules, in a fork of the zygote; they need no teardown at the end.
        """
        self.job, self._fds, self._hidden = job, fds, hidden
        self._initial_modules = hidden.names if hidden is not None else frozenset(sys.modules)
        self.endpoint: inspection_endpoint.InspectionEndpoint | None = None
        self._sides: list[tuple[str, Any]] = []  # of features: ``ddplaunch.core.feature.RankSide``
        self._error: BaseException | None = None
        self._code = 0
        self._interrupted = False
        self._clear_program()

    def _clear_program(self) -> None:
        self.program: Callable[..., Any] = type(None)
        self.positional: tuple[Any, ...] = ()
        self.named: dict[str, object] = {}

    def setup(self) -> None:
        if "crash_socket" in self._fds:
            self._fds["crash_socket"] = inspection_endpoint.move_fd_high(self._fds["crash_socket"])
        if not faulthandler.is_enabled():
            faulthandler.enable(self._fds.get("crash_socket", 2))
        if "rank_channel" in self._fds:
            self.endpoint = inspection_endpoint.InspectionEndpoint(self._fds["rank_channel"], self._import_own)
        for file, settings in self.job["sides"]:
            self._call_isolated(file, self._begin_side, file, settings)
        c10d = "torch.distributed.distributed_c10d"
        inspection_endpoint.call_after_import(c10d, "init_process_group", gloo_teardown.hold_groups)
        _set_buffering()
        if self._hidden is not None:
            _reseed(self._hidden.modules)
        _reset_main_module(self._hidden.modules if self._hidden is not None else {})
        if self._hidden is not None:
            self._begin_handover(self._hidden)
        _init_process_group(self.job)
        kinds = {
            "script": _make_script_call,
            "main": _make_main_call,
            "module": _make_module_call,
            "function": _find_function,
        }
        self.program, self.positional, self.named = kinds[self.job["kind"]](self.job)

    def _begin_handover(self, hidden: hidden_modules.HiddenModules) -> None:
        handover, rank_restart = map(load_private_module, ("core/rank/module_handover", "core/rank/rank_restart"))
        restart = rank_restart.RankRestart(self.job, self._fds, self.endpoint, __file__)
        handover.ModuleHandover(hidden, restart.start_over)

    def _begin_side(self, file: str, settings: Mapping[str, object]) -> None:
        side = load_private_module(file).Side(self, **settings)
        if hasattr(side, "begin"):
            side.begin()
        self._sides.append((file, side))

    def _call_sides(self, hook: str, *arguments: object, backwards: bool = False) -> None:
        for file, side in self._sides[:: -1 if backwards else 1]:
            if (method := getattr(side, hook, None)) is not None:
                self._call_isolated(file, method, *arguments)

    def _call_isolated(self, file: str, function: Callable[..., object], *arguments: object) -> None:
        """Call a function of a feature; report an exception and continue, unless it is an error of the user."""
        try:
            function(*arguments)
        except rank_exit.TargetError:
            raise
        except Exception as error:
            rank_exit.report_bug(f"{file} failed in rank {self.job['rank']}", error)

    def destroy_process_group(self) -> None:
        """Destroy the process group that ``setup`` initialised (--backend), after the program has returned."""
        if self.job["backend"] is None:
            return
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._error = error
        self._clear_program()
        return True

    def _handle_outcome(self) -> None:
        error = self._error
        if error is None:
            return
        kind = type(error)  # isinstance() would ask the exception itself, by its __class__
        if issubclass(kind, SystemExit):
            self._code = rank_exit.exit_code(error)
            if self._code:
                self._report_failure(f"sys.exit({self._code})")
        elif issubclass(kind, rank_exit.TargetError):
            rank_exit.write_error_file(self.job, error, str(error))
            self._code = EXIT_USAGE
        else:
            self._code = 1
            self._interrupted = kind is KeyboardInterrupt
            if not any(hasattr(side, "failed") for _, side in self._sides):  # else the process stays on purpose
                self._report_failure(rank_exit.type_name(error))
            rank_exit.report_exception(self.job, error)
            if not self._interrupted:
                self._call_sides("failed", error)

    def _import_own(self, name: str) -> Any:
        """Import a module of the standard library that the program may have shadowed, or not imported."""
        return (self._hidden and self._hidden.every.get(name)) or __import__(name)

    def _report_failure(self, what: str) -> None:
        if self.endpoint is not None:
            self.endpoint.report_failure(what)

    def exit(self) -> NoReturn:
        """Exit as the interpreter would: print an exception, join threads, run atexit, drop the user's objects, flush.

        While threads and atexit run, the rank can still be inspected. A fork of the zygote does the last steps, too,
        and skips the teardown of preloaded modules (0.5 s for torch, and it would touch every page that the ranks
        share). If daemon threads still run, only the interpreter itself can end without them noticing.
        """
        for name in ("stderr", "stdout"):
            rank_exit.flush_stream(name)
        try:
            self._handle_outcome()
        except SystemExit as exit:  # from the user's own sys.excepthook
            self._code = rank_exit.exit_code(exit)
        self._error = None
        if self._code == 0:
            self._call_sides("done")
        rank_exit.join_program_threads()
        self._import_own("atexit")._run_exitfuncs()
        self._call_sides("leave", backwards=True)
        if self.endpoint is not None:
            self.endpoint.stop()
        if "torch.distributed" in sys.modules:
            gloo_teardown.wait_for_threads()
        if self._hidden is None or len(sys._current_frames()) > 1:
            if self._interrupted:
                rank_exit.raise_to_exit_by_sigint()
            sys.exit(self._code)
        flushed = rank_exit.finalize_user_modules(self._initial_modules)
        self._import_own("ctypes").CDLL(None).fflush(None)
        if self._interrupted:
            rank_exit.die_by_sigint()
        os._exit(rank_exit.to_exit_status(self._code) if flushed else rank_exit.EXIT_FLUSH_FAILED)


def run_program(runner: RankRunner) -> None:
    """Run the program; its exception is stored in ``runner``."""
    try:
        with runner:
            runner.setup()
            runner.program(*runner.positional, **runner.named)
            runner.destroy_process_group()
    except KeyboardInterrupt as error:  # it arrived just after the program's end
        runner.__exit__(None, error, None)


def preallocate_stack_chunk(function: Any) -> Any:
    """Return a copy of a Python function that reserves one large chunk of the interpreter's stack for its callees.

    Since Python 3.11 the stack consists of chunks of 16 KiB, mapped and unmapped as calls cross their ends
    (``_PyThreadState_PopFrame``): 26,000 times during Lightning's import, which is 5 % of its time.
    """
    if sys.version_info < (3, 11):
        return function
    return type(function)(function.__code__.replace(co_stacksize=_STACK_CHUNK_SLOTS), function.__globals__)


def list_importable(folder: str) -> set[str]:
    """Return the names that ``import`` finds in a folder, except packages without ``__init__``."""
    try:
        entries = os.listdir(folder)
    except OSError:
        return set()
    names = set()
    for entry in entries:
        name, dot, _ = entry.partition(".")
        file = entry if dot else os.path.join(entry, "__init__.py")
        if file.endswith((".py", ".pyc", ".so")) and os.path.isfile(os.path.join(folder, file)):
            names.add(name)
    return names


def is_loaded_from(module: ModuleType | None, folder: str) -> bool:
    """Whether a top-level module was imported from a file or package directly in ``folder``."""
    path = os.path.normpath(os.path.join(rank_exit.current_folder(), getattr(module, "__file__", None) or "/"))
    return folder in (os.path.dirname(path), os.path.dirname(os.path.dirname(path)))


def _set_buffering() -> None:
    """Make stdout and stderr line-buffered, so that the last lines of a killed rank are not lost.

    Python does that on a terminal only. Bytes written to ``sys.stdout.buffer`` stay in its buffer.
    """
    if os.environ.get("PYTHONUNBUFFERED"):
        return
    streams: tuple[Any, ...] = (sys.stdin, sys.stdout, sys.stderr)
    for fd, stream in enumerate(streams):
        if stream is not None:
            stream.reconfigure(line_buffering=fd > 0 or os.isatty(fd))


def _reseed(modules: Mapping[str, Any]) -> None:
    """Reseed the generators that numpy and torch seeded at import in the zygote; the random module reseeds itself."""
    numpy_random, torch = modules.get("numpy.random"), modules.get("torch")
    if numpy_random is not None:
        numpy_random.seed()
    if torch is not None:
        torch.default_generator.seed()


def _reset_main_module(preloaded: Mapping[str, ModuleType]) -> None:
    main = _Module("__main__")
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing's alias, used by classes in spawned children
        sys.modules["__mp_main__"] = main
    for name in ("dill._dill", "dill.session"):  # dill recognises the program's own functions by it
        if name in preloaded:
            preloaded[name].__dict__["_main_module"] = main


def _make_script_call(job: PythonJob) -> Call:
    # __file__ of __main__ is absolute since 3.9; argv[0] is unchanged.
    path = os.path.join(rank_exit.current_folder(), job["path"])
    _set_argv_and_path(job, job["path"], job["path"])
    loader: Any = SourceFileLoader
    namespace = sys.modules["__main__"].__dict__
    with io.open_code(path) as file:
        source = file.read()
    if path.endswith(".pyc"):
        loader = SourcelessFileLoader
        code = _load_code(job["path"], source)
    else:
        code = compile(source, path, "exec", dont_inherit=True)
    namespace.update(__file__=path, __cached__=None, __loader__=loader("__main__", path))
    return exec, (code, namespace), {}


def _load_code(path: str, content: bytes) -> object:
    """Return the code in a compiled file, after its header (PEP 552)."""
    try:
        code = marshal.loads(content[16:])
    except (EOFError, ValueError, TypeError):
        code = None
    if type(code) is not type(_load_code.__code__):
        raise rank_exit.TargetError(f"{path} is damaged: it holds no code object", "compile its source again")
    return code


def _make_main_call(job: PythonJob) -> Call:
    _set_argv_and_path(job, job["path"], job["path"])
    return _make_runpy_call("__main__", False)


def _make_module_call(job: PythonJob) -> Call:
    _set_argv_and_path(job, "-m", "-m", job["module"])
    return _make_runpy_call(job["module"])


def _make_runpy_call(*arguments: object) -> Call:
    import runpy

    return runpy._run_module_as_main, arguments, {}  # type: ignore[attr-defined]


def _find_function(job: PythonJob) -> Call:
    _set_argv_and_path(job, job["path"] or job["module"], job["target_text"])
    function = _import_function(job)
    return (function, *_bind_arguments(job, function))


def _set_argv_and_path(job: PythonJob, first: str, *typed: str) -> None:
    sys.argv = [first, *job["args"]]
    sys.orig_argv[:] = [sys.executable, *typed, *job["args"]]
    if job["kind"] == "main" or not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, job["sys_path_0"])


def _import_function(job: PythonJob) -> Callable[..., Any]:
    target: Any = _import_module(job["module"], job["path"])
    for part in job["function"].split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            file = os.path.basename(job["path"])
            raise rank_exit.TargetError(f"{file or job['module']} has no function {job['function']}") from None
    if not callable(target) or isinstance(target, type):
        raise rank_exit.TargetError(f"{job['target_text']} is not a function: it is {target!r:.80}")
    if getattr(getattr(target, "__code__", None), "co_flags", 0) & 0x80:  # CO_COROUTINE
        raise rank_exit.TargetError(
            f"{job['target_text']} is a coroutine function", "wrap it in a function that calls asyncio.run"
        )
    return target  # type: ignore[no-any-return]


def _import_module(name: str, path: str) -> ModuleType:
    """Import a module by name or, if ``path`` is known, from that file, even if other modules have its name."""
    loaded = sys.modules.get(name)
    if not path:
        __import__(name)
        return sys.modules[name]
    if loaded is not None and is_loaded_from(loaded, os.path.dirname(os.path.realpath(path))):
        return loaded
    return _load(name, path, sys.modules)


def _bind_arguments(job: PythonJob, function: Callable[..., Any]) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments to call ``function`` with.

    ddplaunch's modules and click are imported as if the user's files did not exist, and removed from ``sys.modules``
    again if a user's file has the same name.
    """
    names = list_importable(job["sys_path_0"])
    before, path = dict(sys.modules), list(sys.path)
    for name in before:
        top = name.partition(".")[0]
        if top in names and is_loaded_from(before.get(top), job["sys_path_0"]):
            del sys.modules[name]
    home = os.path.dirname(PACKAGE_DIR)
    sys.path[:] = [*(each for each in path if each != job["sys_path_0"]), home]
    try:
        from ddplaunch.base.errors import LaunchError
        from ddplaunch.system.target import arguments

        positional, named = arguments.bind_arguments(
            job["target_text"], function, tuple(job["args"]), job["facts"], _make_device
        )
    except LaunchError as error:
        raise rank_exit.TargetError(error.message, error.hint) from None
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] in {"ddplaunch", *names}:
                del sys.modules[name]
        sys.modules.update(before)
    return positional, named


def _make_device(name: str) -> object:
    import torch

    return torch.device(name)


def _init_process_group(job: PythonJob) -> None:
    backend, method = job["backend"], job["init_method"]
    if backend is None:
        return
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise rank_exit.TargetError(
            "this torch was built without torch.distributed", "omit --backend and --init-method"
        )
    known = [name for name in dist.Backend.backend_list if name != "undefined" and dist.is_backend_available(name)]
    for name in [part.rpartition(":")[2] for part in backend.split(",")]:
        if name not in known:
            text = f"--backend {name} is not available: this torch ({torch.__version__}) has {', '.join(known)}"
            raise rank_exit.TargetError(text, f"--backend {known[0]}")
    options: dict[str, object] = {}
    device = torch.device(job["facts"]["device"])
    if backend in ("nccl", "xccl") and device.type != "cpu":
        getattr(torch, device.type).set_device(device)
        options["device_id"] = device
    dist.init_process_group(
        backend, init_method=method or "env://", rank=job["rank"], world_size=job["facts"]["world_size"], **options
    )


def _read_job() -> tuple[PythonJob, dict[str, int]]:
    """Read the marshalled job and descriptors from the descriptor given as first argument."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)  # this file's folder: imports of the user must not find its files
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        job, fds, blocked = marshal.loads(file.read())
    for fd in fds.values():
        os.set_inheritable(fd, False)
    for number in _signal.sigpending():
        if number >= _signal.SIGRTMIN:  # of the launcher, for a handler that a rank had before it started over
            while _signal.sigtimedwait([number], 0):
                pass
    _signal.pthread_sigmask(_signal.SIG_SETMASK, blocked)
    return job, fds


if __name__ == "__main__":
    runner = RankRunner(*_read_job())
    preallocate_stack_chunk(run_program)(runner)
    runner.exit()
