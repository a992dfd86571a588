"""What makes a rank stop where its program says so, or where somebody asks it to: hooks, and one signal.

Here is only what stands ready in every rank that may be debugged; the debugger itself is ``debugger``, which is loaded
once it is needed, and pdb with it. Part of the worker, and bound by its rules.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]  # signal without its enums
import os
import sys
from _frozen_importlib import _find_spec  # type: ignore[attr-defined]
from _thread import RLock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType
    from typing import Any

    from ddplaunch.rank.debugger import Debugger

_STOP_FUNCTIONS = {  # the functions by which programs stop, and those who need a terminal
    "pdb": ("set_trace", ""),
    "ipdb": ("set_trace", "ipdb"),
    "pudb": ("set_trace", "pudb"),
    "IPython": ("embed", "IPython"),
    "IPython.core.debugger": ("set_trace", "ipdb"),
    "IPython.terminal.debugger": ("set_trace", "ipdb"),
}
_OWN_DIR = os.path.dirname(__file__) + os.sep


def start_debugpy(rank: int) -> None:
    """Let an editor attach by debugpy, which then has ``breakpoint()``; say what it needs for that."""
    import debugpy  # type: ignore[import-not-found, unused-ignore]

    host, port = debugpy.listen(("127.0.0.1", 0))
    connect = f'"connect": {{"host": "{host}", "port": {port}}}'
    entry = f'{{"name": "rank {rank}", "type": "debugpy", "request": "attach", {connect}}}'
    print(f"for launch.json: {entry}", file=sys.stderr, flush=True)


class BreakpointHooks:
    """The hooks of one rank, from ``Life.begin`` on."""

    def __init__(self, socket_path: str, rank: int, load_module: Callable[[str], Any]) -> None:
        """``socket_path`` is the launcher's socket; ``load_module`` loads a file that stands beside this one."""
        self._path, self._rank, self._sibling = socket_path, rank, load_module
        self._pid = os.getpid()
        self._debugger: Debugger | None = None
        self._making = RLock()  # a signal may come in the midst
        self._patched: list[tuple[ModuleType, str, Any]] = []  # module, name of the function, as it was
        self.signal = 0  # on which the main thread stops at its next line; 0 where all are taken
        sys.breakpointhook = self._on_breakpoint
        for name in _STOP_FUNCTIONS.keys() & sys.modules.keys():
            self._patch_module(sys.modules[name])
        if awaited := {*_STOP_FUNCTIONS} - sys.modules.keys():
            sys.meta_path.insert(0, _ImportWatcher(awaited, self._patch_module))
        os.register_at_fork(after_in_child=self._restore)
        self._register()

    def _register(self) -> None:
        if not hasattr(_signal, "SIGRTMIN"):
            return
        blocked = _signal.pthread_sigmask(_signal.SIG_BLOCK, [])
        for number in range(_signal.SIGRTMIN, _signal.SIGRTMAX + 1):
            if number not in blocked and _signal.getsignal(number) == _signal.SIG_DFL:
                _signal.signal(number, self._on_signal)
                _signal.siginterrupt(number, False)  # no call of the program's is to fail
                self.signal = number
                return

    def _restore(self) -> None:
        """Give a process that the program forks Python's own debuggers, without frames of this file."""
        if sys.breakpointhook == self._on_breakpoint:
            sys.breakpointhook = sys.__breakpointhook__
        for module, name, before in self._patched:
            setattr(module, name, before)
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _ImportWatcher)]

    def uninstall(self) -> None:
        """Stop no more: the interpreter's end would let a signal that comes late kill."""
        sys.breakpointhook = sys.__breakpointhook__
        if self.signal and _signal.getsignal(self.signal) == self._on_signal:
            _signal.signal(self.signal, _signal.SIG_IGN)

    def post_mortem(self, error: BaseException) -> None:
        """Let somebody look at the frames that an exception has left."""
        if self._is_rank_process and error.__traceback__ is not None:
            self._load_debugger().post_mortem(error, error.__traceback__)

    @property
    def _is_rank_process(self) -> bool:
        """Whether this is the rank itself, and not a process that it has forked."""
        return os.getpid() == self._pid

    def _load_debugger(self) -> Debugger:
        with self._making:
            if self._debugger is None:
                self._debugger = self._sibling("debugger").Debugger(self._path, self._rank)
        return self._debugger

    def _on_breakpoint(self, *args: Any, **named: Any) -> Any:
        """What ``breakpoint()`` calls."""
        wanted = "" if sys.flags.ignore_environment else os.environ.get("PYTHONBREAKPOINT", "")
        if not self._is_rank_process or wanted not in ("", "pdb.set_trace"):
            return sys.__breakpointhook__(*args, **named)  # which may come to a function below
        return self._load_debugger().stop(sys._getframe(1), *args, **named)

    def _patch_module(self, module: ModuleType) -> None:
        name, tool = _STOP_FUNCTIONS[module.__name__]
        before = getattr(module, name)

        def stop(*args: Any, **named: Any) -> None:
            if not self._is_rank_process:
                return before(*args, **named)  # type: ignore[no-any-return]
            frame = _user_frame(sys._getframe(1))
            if tool:
                return self._stop_at_terminal(tool, before, frame, *args, **named)
            return self._load_debugger().stop(frame, *args, **named)

        stop.__name__ = stop.__qualname__ = name
        stop.__doc__, stop.__module__ = before.__doc__, before.__module__
        setattr(module, name, stop)
        self._patched.append((module, name, before))

    def _stop_at_terminal(self, tool: str, function: Any, frame: FrameType, *args: Any, **named: Any) -> None:
        debugger = self._load_debugger()
        if debugger.terminal is None:
            debugger.terminal = self._sibling("terminal").Terminal(debugger)
        debugger.terminal.stop(tool, function, frame, *args, **named)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_rank_process and frame is not None:
            try:
                self._load_debugger().interrupt(_user_frame(frame))
            except Exception:
                pass  # the person hears that it has not stopped


def _user_frame(frame: FrameType) -> FrameType:
    """The frame, or that of the program by which it was called."""
    while frame.f_code.co_filename.startswith(_OWN_DIR) and frame.f_back is not None:
        frame = frame.f_back
    return frame


class _ImportWatcher:
    """Awaits the import of some modules, and goes when all have come."""

    def __init__(self, awaited: set[str], then: Callable[[ModuleType], None]) -> None:
        self._awaited, self._then = awaited, then
        self._asking: set[str] = set()  # what the others look for, who ask us again

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Also for those who only ask whether there is such a module, and import it later or never."""
        if name not in self._awaited or name in self._asking:
            return None
        self._asking.add(name)
        try:
            spec: Any = _find_spec(name, path, target)
        finally:
            self._asking.discard(name)
        if hasattr(spec and spec.loader, "exec_module"):
            spec.loader = _NotifyingLoader(spec, self._on_import)
        return spec

    def _on_import(self, module: ModuleType) -> None:
        self._awaited.discard(module.__name__)
        if not self._awaited and self in sys.meta_path:
            sys.meta_path.remove(self)
        if hasattr(module, _STOP_FUNCTIONS[module.__name__][0]):
            self._then(module)


class _NotifyingLoader:
    """Loads a module as its own loader does, which then stands in its place again."""

    def __init__(self, spec: Any, then: Callable[[ModuleType], None]) -> None:
        self._spec, self._loader, self._then = spec, spec.loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        self._spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)
