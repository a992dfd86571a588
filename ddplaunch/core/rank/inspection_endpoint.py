"""The rank's end of the rank channel, on which the launcher sends requests, and features of the rank answer them.

Requests are lines; the first letter selects the handler. From the first ``init_process_group`` on a thread reads them.
Before, they are read in the main thread when a signal wakes it (``InspectionEndpoint.wake``), between two instructions
of the program. Nothing here may disturb the program or raise in it. Bound by the rules of ``core/rank/rank_runner.py``.

The channel's own lines, from the rank: ``t`` when the thread runs, ``l`` when it has ended, ``f WHAT`` when the program
has failed, by an exception or ``sys.exit``, ``g PURPOSE SIGNAL`` for a signal on which a feature acts in this rank,
``o PURPOSE SIGNAL`` for one that it will use on request, and ``p BYTES`` and ``r OUTCOME MODULE WHY`` when an import
does not fit what was preloaded (``rank_restart``). The others are those of features.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]  # signal without its enums
import _thread
import os
import sys
import time
from _frozen_importlib import _find_spec  # type: ignore[attr-defined]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType
    from typing import Any

    Handler = Callable[[bytes, FrameType | None], object]
    """Gets the request, and the frame of the program that was interrupted for it; None in the thread."""

_MAX_FD = 1024  # a larger descriptor table would cost memory, and select(2) supports no more
_THREAD_EXIT_TIMEOUT_S = 0.1
_IMPORT_LOCK_FUNCTIONS = ("acquire", "release", "has_deadlock", "_get_module_lock", "_lock_unlock_module", "cb")


class BlockedSignals:
    """Blocks all signals in this thread, within a ``with`` statement; other threads may still get signals."""

    def __enter__(self) -> None:
        self._before = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())

    def __exit__(self, *error: object) -> None:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, self._before)


class InspectionEndpoint:
    """The rank's end of the rank channel; one per process, from ``RankRunner.setup`` on."""

    def __init__(self, fd: int, import_own: Callable[[str], Any]) -> None:
        """Set up the endpoint.

        Args:
            fd: the rank's end of the socket, owned from now on.
            import_own: returns a module of the standard library, if possible without an effect on ``sys.modules``.
        """
        self._import_own = import_own
        self.pid, self.main_thread = os.getpid(), _thread.get_ident()
        self._fd = move_fd_high(fd)
        self._inode = os.fstat(self._fd).st_ino
        self._thread = 0  # native thread id
        self._handlers: dict[bytes, Handler] = {}  # by the first letter of their requests
        self.before_request: Callable[[], object] = lambda: None  # called in the thread
        self.on_wake: list[Callable[[FrameType | None], object]] = []
        """Called in the main thread at each wake signal, with the interrupted frame."""
        self.can_wake: Callable[[], bool] = lambda: False  # whether the wake signal still has its handler
        self.wake_signal = 0
        self.bytes_written = 0  # by ddplaunch in this rank, to whatever file: the program's are counted without them

    def set_handler(self, letters: bytes, handler: Handler) -> None:
        """Handle the requests that begin with one of these letters."""
        self._handlers.update({letters[n : n + 1]: handler for n in range(len(letters))})

    def send(self, line: bytes) -> None:
        """Send a line to the launcher. OSError: the program has closed the channel."""
        data = memoryview(line + b"\n")
        self.bytes_written += len(data)
        while data:
            data = data[os.write(self._fd, data) :]

    def report_signal(self, purpose: str, number: int, *, is_used: bool = True) -> None:
        """Report that a feature handles a signal in this rank from now on or, without ``is_used``, no longer."""
        try:
            self.send(b"%s %s %d" % (b"g" if is_used else b"o", purpose.encode(), number))
        except OSError:
            pass

    def report_failure(self, what: str) -> None:
        """Report the exception or exit code with which the program has failed: its process may live on for long."""
        try:
            if os.getpid() == self.pid and os.fstat(self._fd).st_ino == self._inode:
                self.send(b"f " + what.replace("\n", " ").encode("ascii", "backslashreplace"))
        except Exception:
            pass  # the program has closed it, or replaced a function of os

    def wake(self, frame: FrameType | None) -> None:
        """Handle pending requests; called in the main thread at the wake signal, with the interrupted frame."""
        if os.getpid() != self.pid:
            return  # a process that the program has forked
        if holds_import_lock(frame):
            return  # a request is handled at the next signal
        if not self._thread:
            module = self._import_own("_socket")
            end = module.socket(fileno=os.dup(self._fd))
            try:
                for line in end.recv(4096, module.MSG_DONTWAIT).splitlines():
                    self._handle(line, frame)
            except OSError:
                pass  # no request
            finally:
                end.close()
        for handler in self.on_wake:
            handler(frame)

    def wake_main_thread(self) -> None:
        _signal.pthread_kill(self.main_thread, self.wake_signal)

    def _handle(self, line: bytes, frame: FrameType | None) -> None:
        if (handler := self._handlers.get(line[:1])) is not None:
            handler(line, frame)

    def stop(self) -> None:
        """Stop replying: end the thread, and wait until the kernel no longer lists it."""
        if not self._thread:
            return
        tid, self._thread = self._thread, 0
        try:
            module = self._import_own("_socket")
            end = module.socket(fileno=os.dup(self._fd))
            end.shutdown(module.SHUT_RD)
            end.close()
            self.send(b"l")
        except OSError:
            return  # the program has closed it
        deadline = time.monotonic() + _THREAD_EXIT_TIMEOUT_S
        while os.path.exists(f"/proc/self/task/{tid}") and time.monotonic() < deadline:
            time.sleep(0.0005)

    # ------------------------------------------------------------------------------------------------- the thread

    def start_thread(self, is_needed: Callable[[], object]) -> None:
        """Read the requests in a thread, which ends before the process forks unless ``is_needed`` returns true."""
        # This thread blocks all signals: one delivered to it would not interrupt the call that the program waits in.
        with BlockedSignals():
            _thread.start_new_thread(self._run_thread, ())
        os.register_at_fork(before=lambda: self._stop_thread_before_fork(is_needed))

    def _stop_thread_before_fork(self, is_needed: Callable[[], object]) -> None:
        """End the thread before a fork unless it is needed: Python 3.12 would warn only because of this thread."""
        try:
            if os.getpid() == self.pid and not is_needed():
                self.stop()
        except Exception:
            pass

    def _run_thread(self) -> None:
        self._thread, pending = _thread.get_native_id(), b""
        try:
            self.send(b"t")
            while os.fstat(self._fd).st_ino == self._inode and (data := os.read(self._fd, 4096)):
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self.before_request()
                    self._handle(line, None)
        except BaseException:
            pass  # the program has closed the socket, or this torch differs


def call_after_import(name: str, attribute: str, callback: Callable[[ModuleType], None]) -> None:
    """Call ``callback`` with a module: now or, if it is not imported yet, once it has that attribute."""
    module = sys.modules.get(name)
    hooks = [each for each in sys.meta_path if isinstance(each, PostImportHook) and each.module == name]
    if module is not None:
        callback(module)
    elif hooks:
        hooks[0].callbacks.append(callback)
    else:
        sys.meta_path.insert(0, PostImportHook(name, attribute, callback))


class PostImportHook:
    """Import finder that calls back at the first import after a module has got an attribute, then removes itself."""

    def __init__(self, module: str, attribute: str, callback: Callable[[ModuleType], None]) -> None:
        self.module, self._attribute, self.callbacks = module, attribute, [callback]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        # If the check has removed this finder, sys.meta_path has shrunk while it was being iterated.
        return _find_spec(name, path, target) if self.check() else None

    def check(self) -> bool:
        """Call back if the module has the attribute; return whether it has."""
        module = sys.modules.get(self.module)
        if module is None or not hasattr(module, self._attribute):
            return False
        sys.meta_path.remove(self)
        for callback in self.callbacks:
            try:
                callback(module)
            except Exception:
                pass
        return True


def list_free_signals() -> list[int]:
    """List the real-time signals that the program has neither blocked nor handled so far."""
    if not hasattr(_signal, "SIGRTMIN"):
        return []
    blocked = _signal.pthread_sigmask(_signal.SIG_BLOCK, [])
    numbers = range(_signal.SIGRTMIN, _signal.SIGRTMAX + 1)
    return [n for n in numbers if n not in blocked and _signal.getsignal(n) == _signal.SIG_DFL]


def holds_import_lock(frame: FrameType | None) -> bool:
    """Whether the interrupted code is taking or releasing the lock of a module that is being imported.

    An import in a signal handler would break it before Python 3.12: the program's import raises KeyError, or waits for
    ever (CPython issue 106176).
    """
    while frame is not None:
        code = frame.f_code
        if code.co_filename == "<frozen importlib._bootstrap>" and code.co_name in _IMPORT_LOCK_FUNCTIONS:
            return True
        frame = frame.f_back
    return False


def suspend_tracing() -> Any:
    """Remove and return a debugger's trace function, which would stop in our handler; None for other trace functions.

    ``sys.settrace`` cannot restore a function in C, as of profilers.
    """
    trace = sys.gettrace()
    if not hasattr(trace, "__code__"):
        return None
    sys.settrace(None)
    return trace


def move_fd_high(fd: int) -> int:
    """Move a descriptor to a high number, out of the way of programs that close or count their descriptors."""
    for number in range(min(os.sysconf("SC_OPEN_MAX"), _MAX_FD) - 1, fd, -1):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(fd, number, inheritable=False)
            os.close(fd)
            return number
    return fd
