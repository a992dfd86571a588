"""Turns a process into the user's program: what runs inside each rank, forked from the zygote or freshly started.

The program must not be able to tell that it was not started as ``python train.py`` (docs/fidelity.md lists what
differs). So this file imports nothing that Python has not loaded already, except where a need arises, and leaves no
name of ours behind: it is run or loaded from its path and is in nobody's ``sys.modules``.

A job is a dict (``agent/supervisor.py`` writes it); here only its keys are read.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, NoReturn

EXIT_USAGE = 2


class Refused(Exception):
    """What the user asked for cannot be; found only now that their code or torch could be asked."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def run(job: dict[str, Any], fds: dict[str, int], *, forked: bool) -> NoReturn:
    """Be the rank that ``job`` describes, to its end.

    Args:
        fds: descriptors handed over, by purpose: "store" (the listening socket of rank 0's store) and "hold" (rank 0
            says there that it has finished, and stays until the other end closes).
        forked: whether this process is a fork of the zygote, which has modules that need no taking apart at the end.
    """
    at_start = set(sys.modules)
    store = None
    try:
        import faulthandler

        if not faulthandler.is_enabled() and sys.stderr is not None:
            faulthandler.enable()
        if forked:
            _reseed()
        _replace_main()
        if "store" in fds:
            store = _serve_store(job, fds.pop("store"))
        code = _execute(job, forked)
    except SystemExit as exit:
        code = _exit_code(exit.code)
    _finish(job, code, fds.get("hold"), at_start, forked)
    del store
    sys.exit(code)


# ------------------------------------------------------------------------------------------------ before user code


def _reseed() -> None:
    """numpy's global generator is copied by fork; random reseeds itself, torch's starts from a constant anyway."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def buffer_lines(stream: Any, lines: bool) -> None:
    """Set whether a standard stream is flushed at each newline; PYTHONUNBUFFERED has its own say."""
    if stream is not None and not os.environ.get("PYTHONUNBUFFERED"):
        stream.reconfigure(line_buffering=lines)


def _replace_main() -> None:
    main = type(sys)("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __loader__=None)
    sys.modules["__main__"] = main


def _serve_store(job: dict[str, Any], listening: int) -> object:
    """Open the job's store on the socket that the supervisor bound, so that no rank's first connect is refused.

    The user's own ``env://`` initialisation then finds this server in its process (TCPStore's ``multi_tenant``).
    """
    import torch.distributed as dist

    if not dist.is_available():
        os.close(listening)
        return None
    address, port = job["store"]
    try:
        return dist.TCPStore(
            address, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listening
        )
    except (RuntimeError, NotImplementedError):  # older libuv stores take no descriptor
        return dist.TCPStore(
            address, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listening,
            use_libuv=False,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- user code


def _execute(job: dict[str, Any], forked: bool) -> int:
    """Run the target; return the exit code that an uncaught exception stands for. SystemExit passes through."""
    try:
        _initialise(job)
        {"script": _run_script, "module": _run_module, "function": _call_function}[job["kind"]](job)
        _destroy(job)
    except SystemExit:
        raise
    except Refused as refused:
        _record(job, refused, str(refused), {"hint": refused.hint})
        return EXIT_USAGE
    except BaseException as error:
        _report(job, error)
        if isinstance(error, KeyboardInterrupt):
            _die_of_interrupt()
        return 1
    return 0


def _run_script(job: dict[str, Any]) -> None:
    import io
    from importlib.machinery import SourceFileLoader

    path = os.path.abspath(job["path"])  # since 3.9 __file__ of __main__ is absolute; argv[0] stays as typed
    sys.argv = [job["path"], *job["args"]]
    _original_argv(job["path"], *job["args"])
    _put_first(job["first"])
    with io.open_code(path) as file:
        source = file.read()
    main = sys.modules["__main__"]
    main.__dict__.update(
        __file__=path, __cached__=None, __spec__=None, __package__=None, __doc__=None,
        __loader__=SourceFileLoader("__main__", path), __annotations__={},
    )  # fmt: skip
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _run_module(job: dict[str, Any]) -> None:
    import runpy

    sys.argv = [job["module"], *job["args"]]
    _original_argv("-m", job["module"], *job["args"])
    _put_first(job["first"])
    runpy._run_module_as_main(job["module"], alter_argv=True)  # type: ignore[attr-defined]


def _call_function(job: dict[str, Any]) -> None:
    sys.argv = [job["path"] or job["module"], *job["args"]]
    _original_argv(job["typed"], *job["args"])
    _put_first(job["first"])
    function = _import_function(job)
    known = {
        "rank": job["rank"],
        "local_rank": job["local_rank"],
        "world_size": job["world_size"],
        "local_world_size": job["local_world_size"],
        "node_rank": job["node_rank"],
        "nnodes": job["nnodes"],
        "device": job["device"],
    }
    before = set(sys.modules)
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path.append(home)  # so that a launcher that runs from a source tree finds itself here too
    try:
        from ddplaunch.agent import arguments
        from ddplaunch.errors import LaunchError

        positional, named = arguments.bind(job["typed"], function, tuple(job["args"]), known)
    except LaunchError as error:
        raise Refused(error.message, error.hint) from None
    finally:
        sys.path.remove(home)
        _forget(before, job["first"])
    function(*positional, **named)


def _import_function(job: dict[str, Any]) -> Callable[..., Any]:
    """Import the function's module as ``import`` would, a file whose name is no module's name from its path."""
    name: str = job["module"]
    if job["path"] and (not name.isidentifier() or name in sys.modules):
        import importlib.util

        spec = importlib.util.spec_from_file_location(name, job["path"])
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        __import__(name)
        module = sys.modules[name]
    found: Any = module
    for part in job["function"].split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise Refused(f"{name} has no function {job['function']}, now that it has been imported") from None
    if not callable(found) or isinstance(found, type):
        raise Refused(f"{job['typed']} is no function: it is {found!r:.80}")
    if _is_coroutine_function(found):
        raise Refused(f"{job['typed']} is a coroutine function", "wrap it in a function that calls asyncio.run")
    return found  # type: ignore[no-any-return]


def _is_coroutine_function(function: Any) -> bool:
    return bool(getattr(getattr(function, "__code__", None), "co_flags", 0) & 0x80)  # CO_COROUTINE


def _put_first(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _forget(before: set[str], folder: str) -> None:
    """Take modules that we imported out of the way of files of the user's that bear their names."""
    for name in set(sys.modules) - before:
        top = name.partition(".")[0]
        if os.path.exists(os.path.join(folder, top + ".py")):
            del sys.modules[name]


def _original_argv(*words: str) -> None:
    sys.orig_argv[:] = [sys.executable, *words]


# --------------------------------------------------------------------------------------------- the process group


def _initialise(job: dict[str, Any]) -> None:
    """Initialise the process group before the target runs, where --backend or --init-method asked for it."""
    backend, method = job["backend"], job["init_method"]
    if backend is None:
        return
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise Refused("this torch was built without torch.distributed", "leave --backend and --init-method out")
    known = [name for name in dist.Backend.backend_list if name != "undefined" and _has(dist, name)]
    for name in [part.rpartition(":")[2] for part in backend.split(",")]:
        if name not in known:
            raise Refused(
                f"--backend {name}: this torch ({torch.__version__}) has only {', '.join(known)}",
                f"--backend {known[0]}",
            )
    options: dict[str, Any] = {}
    device = torch.device(job["device"])
    if backend in ("nccl", "xccl") and device.type != "cpu":
        getattr(torch, device.type).set_device(device)
        options["device_id"] = device
    dist.init_process_group(
        backend, init_method=method or "env://", rank=job["rank"], world_size=job["world_size"], **options
    )


def _has(dist: Any, name: str) -> bool:
    asked = getattr(dist, "is_backend_available", None)
    return bool(asked(name)) if asked else bool(getattr(dist, f"is_{name}_available", lambda: True)())


def _destroy(job: dict[str, Any]) -> None:
    if job["backend"] is None:
        return
    import time

    import torch.distributed as dist

    if dist.is_initialized():
        # gloo's teardown can deadlock while the last work is still being dropped (torch 2.13): all meet, then a moment.
        dist.barrier()
        time.sleep(0.02)
        dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------------- endings


def _exit_code(code: object) -> int:
    """What ``sys.exit(code)`` means to Python: None is 0, a number itself, anything else is printed and 1."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    if sys.stderr is not None:
        _flush(sys.stdout)
        print(code, file=sys.stderr)
    return 1


def _report(job: dict[str, Any], error: BaseException) -> None:
    """Show an uncaught exception as Python would, without our frames, and record it for the launcher's report."""
    error = error.with_traceback(_user_frames(error.__traceback__))
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    interrupted = isinstance(error, KeyboardInterrupt)
    if not interrupted:
        import traceback

        _record(job, error, "".join(traceback.format_exception(type(error), error, error.__traceback__)), {})
    _flush(sys.stdout)
    if interrupted and job["local_rank"] and sys.excepthook is sys.__excepthook__:
        return  # Ctrl-C interrupts all ranks: one traceback says where they were
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as broken:
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(broken), broken, _user_frames(broken.__traceback__))
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _record(job: dict[str, Any], error: BaseException, text: str, extra: dict[str, Any]) -> None:
    """Write the error file unless ``@record`` has: torchelastic's format, {"message": {"message", "extraInfo"}}."""
    path = job["error_file"]
    if not path or os.path.exists(path):
        return
    import json
    import time

    message = f"{type(error).__name__}: {error}" if not isinstance(error, Refused) else str(error)
    info = {"py_callstack": text, "timestamp": str(int(time.time())), "time_ns": time.time_ns()}
    if isinstance(error, Refused):
        info["refused"] = extra
    try:
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump({"message": {"message": message, "extraInfo": info}}, file)
    except OSError:
        pass  # a full disk: the report falls back on what the rank printed


def _die_of_interrupt() -> NoReturn:
    """End by SIGINT itself, as Python does, so that whoever waits for us can tell."""
    import signal

    _flush(sys.stdout)
    _flush(sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(130)


def _finish(job: dict[str, Any], code: int, hold: int | None, at_start: set[str], forked: bool) -> None:
    """End as the interpreter would: join threads, run atexit, and, in a fork, drop the user's modules and leave.

    A fork skips what only costs time: taking apart what the zygote imported (0.5 s of torch, and it would touch every
    page that the ranks share).
    """
    if not forked and (hold is None or code != 0):
        return
    import atexit
    import threading

    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:
        _unraisable(error, threading._shutdown)  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if hold is not None and code == 0:
        _stay(hold)
    if not forked:
        return
    _drop_modules(at_start)
    flushed = _flush(sys.stdout, loud=True) and _flush(sys.stderr)
    import ctypes

    ctypes.CDLL(None).fflush(None)
    os._exit((code if flushed or code else 120) & 0xFF)


def _stay(hold: int) -> None:
    """Rank 0 holds the store, so it says that it is done and stays until the launcher lets it go."""
    import signal

    _flush(sys.stdout)
    _flush(sys.stderr)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.write(hold, b"done")
        os.read(hold, 1)
    except OSError:
        pass


def _drop_modules(at_start: set[str]) -> None:
    """Clear the globals of the modules that came after the start, so that ``__del__`` runs and files are flushed.

    In the interpreter's own order: ``__main__``, then the latest import first; private names before the others.
    """
    import gc

    imported = [module for name, module in list(sys.modules.items()) if name not in at_start and name != "__main__"]
    for module in [sys.modules.get("__main__"), *reversed(imported)]:
        if type(module) is not type(sys):
            continue
        names = module.__dict__
        for private in (True, False):
            for name in list(names):
                if name != "__builtins__" and (name[:1] == "_" and name[:2] != "__") is private:
                    names[name] = None
    gc.collect()


def _flush(stream: Any, *, loud: bool = False) -> bool:
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except Exception as error:
        if loud:
            _unraisable(error, stream)
        return False
    return True


def _unraisable(error: BaseException, source: object) -> None:
    """Print "Exception ignored in: …" as the interpreter does at its own end."""
    from types import SimpleNamespace

    hook: Any = sys.unraisablehook
    hook(
        SimpleNamespace(
            exc_type=type(error), exc_value=error, exc_traceback=error.__traceback__, err_msg=None, object=source
        )
    )


# --------------------------------------------------------------------------------------------------- a fresh start


def _main() -> NoReturn:
    """Entry of a rank that was exec'ed: ``python worker.py FD …`` with the job, marshalled, to be read from FD."""
    import marshal

    if not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)  # this file's folder, which no import of the user's may see
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        job, fds = marshal.loads(file.read())
    if job["line_buffered"]:
        buffer_lines(sys.stdout, True)
    for fd in fds.values():
        os.set_inheritable(fd, False)
    run(job, fds, forked=False)


if __name__ == "__main__":
    _main()
