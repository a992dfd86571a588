"""Breakpoint hooks of a rank (``--debug``): for breakpoint(), pdb.set_trace() and similar, and a signal to pause it.

Only the hooks are installed in every rank that may be debugged; the debugger itself (``rank_debugger``, and pdb with
it) is loaded at the first stop. Bound by the rules of ``core/rank/rank_runner.py``.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]  # signal without its enums
import os
import sys
from _thread import RLock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType
    from typing import Any

    from ddplaunch.core.rank import inspection_endpoint, rank_exit
    from ddplaunch.core.rank.rank_runner import RankRunner, load_private_module
    from ddplaunch.features.debug.rank.debugger_terminal import DebuggerTerminal
    from ddplaunch.features.debug.rank.rank_debugger import Debugger
else:
    inspection_endpoint = load_private_module("core/rank/inspection_endpoint")
    rank_exit = load_private_module("core/rank/rank_exit")

_STOP_FUNCTIONS = {  # by module: the function that stops the program, and the debugger's name if it needs a terminal
    "pdb": ("set_trace", ""),
    "ipdb": ("set_trace", "ipdb"),
    "pudb": ("set_trace", "pudb"),
    "IPython": ("embed", "IPython"),
    "IPython.core.debugger": ("set_trace", "ipdb"),
    "IPython.terminal.debugger": ("set_trace", "ipdb"),
}
_OWN_DIR = os.path.dirname(__file__) + os.sep


class Side:
    """The debugger's part in a rank: installs breakpoint hooks, or lets an editor attach to the rank."""

    def __init__(self, rank: RankRunner, debugpy: bool, socket: str, post_mortem: bool, long_timeouts: bool) -> None:
        """``debugpy``: an editor may attach. ``socket``: the path of the debug server's socket; "" for none.

        ``post_mortem``: stop at the exception that ends the program. ``long_timeouts``: give process groups without a
        timeout one of a day.
        """
        self._rank, self._debugpy, self._socket, self._long_timeouts = rank, debugpy, socket, long_timeouts
        self._hooks: BreakpointHooks | None = None
        if post_mortem:
            self.failed = self._post_mortem

    def begin(self) -> None:
        rank = self._rank
        if self._long_timeouts and rank.endpoint is not None:
            inspection_endpoint.call_after_import(
                "torch.distributed.distributed_c10d", "init_process_group", _set_long_timeouts
            )
        if self._debugpy:
            start_debugpy(rank.job["rank"])
        elif self._socket:
            self._hooks = BreakpointHooks(self._socket, rank.job["rank"])
            if rank.endpoint is not None:
                rank.endpoint.report_signal("debug", self._hooks.signal)

    def _post_mortem(self, error: BaseException) -> None:
        if self._hooks is not None:
            self._hooks.post_mortem(error)
        elif os.isatty(0):
            import pdb

            pdb.post_mortem(rank_exit.trace_of(error))

    def leave(self) -> None:
        if self._hooks is not None:
            self._hooks.uninstall()


def _set_long_timeouts(module: Any) -> None:
    """Set the default timeout of process groups to one day, in the torch module that creates them."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        if getattr(module, name, None) is not None:
            setattr(module, name, module.timedelta(days=1))


def start_debugpy(rank: int) -> None:
    """Let an editor attach by debugpy, which handles ``breakpoint()`` then; print the launch.json entry for it."""
    try:
        import debugpy  # type: ignore[import-not-found, unused-ignore]

        host, port = debugpy.listen(("127.0.0.1", 0))
    except Exception as error:
        raise rank_exit.TargetError(
            f"--debugpy does not work in rank {rank}: {type(error).__name__}: {error}"
        ) from None
    connect = f'"connect": {{"host": "{host}", "port": {port}}}'
    entry = f'{{"name": "rank {rank}", "type": "debugpy", "request": "attach", {connect}}}'
    print(f"for launch.json: {entry}", file=sys.stderr, flush=True)


class BreakpointHooks:
    """The breakpoint hooks of one rank, from its start on."""

    def __init__(self, socket_path: str, rank: int) -> None:
        """``socket_path``: the debug server's socket."""
        self._path, self._rank = socket_path, rank
        self._pid = os.getpid()
        self._debugger: Debugger | None = None
        self._terminal: DebuggerTerminal | None = None  # for debuggers that need one
        self._load_lock = RLock()  # reentrant: the signal may arrive while it is held
        self._patched: list[tuple[Any, str, Any]] = []  # module or class, function name, original function
        self.signal = 0  # stops the main thread at its next line; 0 if no signal is free
        sys.breakpointhook = self._on_breakpoint
        for name in _STOP_FUNCTIONS.keys() & sys.modules.keys():
            self._patch_module(sys.modules[name])
        if missing := {*_STOP_FUNCTIONS} - sys.modules.keys():
            sys.meta_path.insert(0, _ImportWatcher(missing, self._patch_module))
        os.register_at_fork(after_in_child=self._uninstall_in_fork)
        if free := inspection_endpoint.list_free_signals():
            self.signal = free[0]
            _signal.signal(self.signal, self._on_signal)
            _signal.siginterrupt(self.signal, False)  # system calls of the program must not fail with EINTR

    def _uninstall_in_fork(self) -> None:
        """Called in a process that the program forks: restore Python's own debuggers, without frames of this file."""
        if sys.breakpointhook == self._on_breakpoint:
            sys.breakpointhook = sys.__breakpointhook__
        for module, name, before in self._patched:
            setattr(module, name, before)
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _ImportWatcher)]

    def uninstall(self) -> None:
        """Remove the hooks, and ignore the signal: its default action would kill the process if it arrives late."""
        sys.breakpointhook = sys.__breakpointhook__
        if self.signal and _signal.getsignal(self.signal) == self._on_signal:
            _signal.signal(self.signal, _signal.SIG_IGN)

    def post_mortem(self, error: BaseException) -> None:
        """Enter the debugger at the frames of an exception that has ended the program."""
        if self._is_rank_process and error.__traceback__ is not None:
            self._load_debugger().post_mortem(error, rank_exit.trace_of(error))

    @property
    def _is_rank_process(self) -> bool:
        """Whether this process is the rank itself, not one that it has forked."""
        return os.getpid() == self._pid

    def _load_debugger(self) -> Debugger:
        with self._load_lock:
            if self._debugger is None:
                self._debugger = load_private_module("features/debug/rank/rank_debugger").Debugger(
                    self._path, self._rank
                )
        return self._debugger

    def _on_breakpoint(self, *args: Any, **named: Any) -> Any:
        """The ``sys.breakpointhook``, called by ``breakpoint()``."""
        hook_name = "" if sys.flags.ignore_environment else os.environ.get("PYTHONBREAKPOINT", "")
        if not self._is_rank_process or hook_name not in ("", "pdb.set_trace"):
            return sys.__breakpointhook__(*args, **named)  # which may call a patched function below
        return self._load_debugger().stop(sys._getframe(1), *args, **named)

    def _patch_module(self, module: ModuleType) -> None:
        name, tool = _STOP_FUNCTIONS[module.__name__]
        before = getattr(module, name)

        def stop_in_debugger(*args: Any, **named: Any) -> None:
            if not self._is_rank_process:
                return before(*args, **named)  # type: ignore[no-any-return]
            frame = _user_frame(sys._getframe(1))
            debugger = self._load_debugger()
            if not tool:
                return debugger.stop(frame, *args, **named)
            if self._terminal is None:
                self._terminal = load_private_module("features/debug/rank/debugger_terminal").DebuggerTerminal(debugger)
            self._terminal.stop(tool, before, frame, *args, **named)
            return None

        stop_in_debugger.__name__ = stop_in_debugger.__qualname__ = name
        stop_in_debugger.__doc__, stop_in_debugger.__module__ = before.__doc__, before.__module__
        setattr(module, name, stop_in_debugger)
        self._patched.append((module, name, before))
        if module.__name__ == "pdb":
            self._patch_pdb(module.Pdb)

    def _patch_pdb(self, pdb: Any) -> None:
        """Make ``Pdb().set_trace()`` use this debugger, also in subclasses like that of ``dist.breakpoint()``."""
        before = pdb.set_trace

        def set_trace(instance: Any, frame: FrameType | None = None, *args: Any, **named: Any) -> None:
            frame = frame or _user_frame(sys._getframe(1))
            if self._is_rank_process and _reads_stdin(instance):
                return self._load_debugger().stop(frame, *args, **named)
            return before(instance, frame, *args, **named)  # type: ignore[no-any-return]

        pdb.set_trace = set_trace
        self._patched.append((pdb, "set_trace", before))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_rank_process and frame is not None and not inspection_endpoint.holds_import_lock(frame):
            trace = inspection_endpoint.suspend_tracing()
            try:
                if self._terminal is not None:
                    self._terminal.interrupt_if_detached()
                self._load_debugger().interrupt(_user_frame(frame))
            except Exception:
                pass  # the debug client reports that the rank has not stopped
            finally:
                if trace is not None and sys.gettrace() is None:
                    sys.settrace(trace)


def _reads_stdin(pdb: Any) -> bool:
    """Whether a debugger reads this process's stdin. IPython's does not count: ``DebuggerTerminal`` serves it."""
    return pdb.stdin is sys.stdin and not any(each.__module__.startswith("IPython.") for each in type(pdb).__mro__)


def _user_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame outside this package folder, from ``frame`` outwards."""
    while frame.f_code.co_filename.startswith(_OWN_DIR) and frame.f_back is not None:
        frame = frame.f_back
    return frame


class _ImportWatcher:
    """Import finder that calls back after the import of some modules, and removes itself after the last."""

    def __init__(self, modules: set[str], callback: Callable[[ModuleType], None]) -> None:
        self._missing, self._callback = modules, callback

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a watched module and patch its loader; may also be called to check only whether the module exists."""
        if name not in self._missing:
            return None
        others: list[Any] = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        spec: Any = next((found for each in others if (found := each.find_spec(name, path, target))), None)
        if hasattr(spec and spec.loader, "exec_module"):
            try:
                self._call_after_import(spec.loader)
            except AttributeError:
                pass  # a loader with slots: this debugger stops at its own terminal
        return spec

    def _call_after_import(self, loader: Any) -> None:
        """Make a loader call back after an import; it stays patched, as a zip file's modules share one loader."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ in self._missing:
                self._on_import(module)

        loader.exec_module = exec_module

    def _on_import(self, module: ModuleType) -> None:
        self._missing.discard(module.__name__)
        if not self._missing and self in sys.meta_path:
            sys.meta_path.remove(self)
        if hasattr(module, _STOP_FUNCTIONS[module.__name__][0]):
            self._callback(module)
