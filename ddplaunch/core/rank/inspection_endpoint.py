"""The inspection endpoint of a rank: stacks and collective progress on request, whatever the program is doing.

Stacks are requested by one of two signals, on which ``faulthandler`` writes those of all threads to a memfd. On the
first, a Python handler runs between two instructions. On the second faulthandler writes at once, even while a thread
holds the GIL: it is for a main thread in native code only, because a frame in the midst of a call would be read
halfway, which can crash Python 3.11 and 3.12. Only the output of the first is enclosed in two zero bytes. The progress
in collectives is reported by a waiting thread, from the first ``init_process_group`` on: torch's flight recorder has
it, on every backend (torch._C._distributed_c10d). Nothing here may disturb the program or raise in it; what this torch
lacks is left out. Part of the worker (``core/rank/rank_runner.py``) and bound by its rules.

The protocol on the rank channel is lines. From the rank: ``h FIRST SECOND FD THIRD`` at its start, ``t`` when the
thread runs, ``l`` when it has ended, ``x LEFT`` if the program has taken one of the signals or both, replies ``s7 …``
with tab-separated parts, ``g PURPOSE SIGNAL`` for a signal on
which a feature acts, ``f WHAT`` when the program has failed, by an
exception or ``sys.exit``. To the rank: ``s7`` (progress) and ``e7`` (also the last collectives), with the request's
number; ``p …`` and ``q`` start and end a profile, by ticks of the third signal (``sampler``); ``n``: record the
exception being handled (``in_flight``). A rank without the thread reads the last three when the first signal comes.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]  # signal without its enums
import _thread
import faulthandler
import os
import sys
import time
from _frozen_importlib import _find_spec  # type: ignore[attr-defined]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CellType, FrameType, ModuleType
    from typing import Any

_MAX_FD = 1024  # a larger descriptor table would cost memory, and select(2) supports no more
_THREAD_EXIT_TIMEOUT_S = 0.1
_MAX_TASKS, _MAX_CALLS = 32, 100
_FAULTHANDLER_FRAMES = 100  # MAX_FRAME_DEPTH in Python/traceback.c: it writes the innermost frames only
_MAX_OUTER_FRAMES = 500
_C10D = "torch.distributed.distributed_c10d"


class InspectionEndpoint:
    """The rank's end of the rank channel; one per process, from ``RankRunner.setup`` on."""

    def __init__(self, fd: int, load_module: Callable[[str], Any]) -> None:
        """``fd``: the rank's end of the socket, owned from now on. ``load_module`` loads a file of the package."""
        global _endpoint
        _endpoint = self
        self._pid, self._main = os.getpid(), _thread.get_ident()
        self._fd = _move_fd_high(fd)
        self._inode = os.fstat(self._fd).st_ino
        self._thread = 0  # native thread id
        self._stacks: tuple[int, int, int, int] | None = None  # first and second signal, descriptor, third signal
        self._load_module = load_module
        self.on_request: Callable[[], object] = lambda: None  # called in the thread
        self._sampler: Any = None  # of the current profile
        self._state: Any = None  # the module torch_state, once there is a process group
        self._group_created = 0.0  # monotonic time of the first process group
        try:
            self._stacks = _register_stacks()
            self._write_line(b"h %d %d %d %d" % (self._stacks or (0, 0, 0, 0)))
            self._hook_torch()
        except Exception:
            pass  # the launcher reports that the rank gives no reply

    def report_signal(self, purpose: str, number: int) -> None:
        """Report a signal on which a feature acts in this rank."""
        try:
            self._write_line(b"g %s %d" % (purpose.encode(), number))
        except OSError:
            pass

    def report_failure(self, what: str) -> None:
        """Report the exception or exit code with which the program has failed: its process may live on for long."""
        try:
            if os.getpid() == self._pid and os.fstat(self._fd).st_ino == self._inode:
                self._write_line(b"f " + what.replace("\n", " ").encode("ascii", "backslashreplace"))
        except OSError:
            pass  # the program has closed it

    def stop(self) -> None:
        """Stop replying: end the thread, and wait until the kernel no longer lists it."""
        if self._stacks and _signal.getsignal(self._stacks[0]) is _write_stacks:
            _signal.signal(self._stacks[0], _signal.SIG_IGN)  # its default, restored at the interpreter's end, kills
        if self._sampler and self._stacks and _signal.getsignal(self._stacks[3]) == self._sampler.on_tick:
            _signal.signal(self._stacks[3], _signal.SIG_IGN)
        if not self._thread:
            return
        tid, self._thread = self._thread, 0
        from _socket import SHUT_RD, socket

        try:
            end = socket(fileno=os.dup(self._fd))
            end.shutdown(SHUT_RD)
            end.close()
            self._write_line(b"l")
        except OSError:
            return  # the program has closed it
        deadline = time.monotonic() + _THREAD_EXIT_TIMEOUT_S
        while os.path.exists(f"/proc/self/task/{tid}") and time.monotonic() < deadline:
            time.sleep(0.0005)

    def write_trace(self, path: str, after: float) -> None:
        """Write torch's record of the last collectives, if the first group is at least ``after`` seconds old.

        It takes up to 0.4 s, which is acceptable in a long run only. Write errors are ignored.
        """
        try:
            if self._group_created and time.monotonic() - self._group_created >= after and os.getpid() == self._pid:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.write(b"\n".join(self._state.traces(details=True)))
        except Exception:
            pass

    def _write_line(self, line: bytes) -> None:
        data = memoryview(line + b"\n")
        while data:
            data = data[os.write(self._fd, data) :]

    # ------------------------------------------------------------------------------------------- the one-shot hook

    def _hook_torch(self) -> None:
        """Hook into torch.distributed now or, if the program has not imported it yet, right after the import."""
        call_after_import(_C10D, "init_process_group", self._wrap_init_process_group)

    def _wrap_init_process_group(self, module: ModuleType) -> None:
        """Replace ``init_process_group`` in the closure cell of its decorator, so that no attribute changes."""
        for cell in getattr(module.init_process_group, "__closure__", None) or ():
            found = cell.cell_contents
            if getattr(found, "__name__", "") == "init_process_group":
                cell.cell_contents = _CallOnce(cell, found, lambda: self._start_thread(module))

    def _start_thread(self, module: ModuleType) -> None:
        if os.getpid() != self._pid:
            return
        self._group_created = time.monotonic()
        self._state = self._load_module("features/inspect/rank/torch_state")

        # This thread blocks all signals: one delivered to it would not interrupt the call that the program waits in.
        before = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
        try:
            _thread.start_new_thread(self._run_thread, (module,))
        finally:
            _signal.pthread_sigmask(_signal.SIG_SETMASK, before)
        os.register_at_fork(before=lambda: self._stop_thread_before_fork(module))

    def _stop_thread_before_fork(self, module: ModuleType) -> None:
        """End the thread before a fork if torch has none, so that Python 3.12 does not warn because of it alone."""
        try:
            if os.getpid() == self._pid and not module.is_initialized():
                self.stop()
        except Exception:
            pass

    # ------------------------------------------------------------------------------------------------- the thread

    def _run_thread(self, module: ModuleType) -> None:
        self._thread, pending = _thread.get_native_id(), b""
        try:
            self._write_line(b"t")
            while os.fstat(self._fd).st_ino == self._inode and (data := os.read(self._fd, 4096)):
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    if self._stacks and (left := _signals_left(*self._stacks[:2])) < 2:
                        self._write_line(b"x %d" % left)
                    if line[:1] in (b"p", b"q"):
                        self._handle_profile(line)
                        continue
                    self.on_request()
                    if line == b"n":
                        continue
                    self._write_line(line + b" " + self._build_reply(module, details=line.startswith(b"e")))
        except BaseException:
            pass  # the program has closed the socket, or this torch differs

    def _build_reply(self, module: ModuleType, *, details: bool) -> bytes:
        """The parts of ``torch_state``; the current call is followed by the outer frames of a deep stack."""
        initialised, groups, call, *traces = self._state.describe(module, details=details)
        outer = _outer_frames(sys._current_frames().get(self._main), _FAULTHANDLER_FRAMES)
        call += outer and b"|" + outer.replace(b"\t", b" ").replace(b"\n", b"\r")
        return b"\t".join([initialised, groups, call, *traces])

    # --------------------------------------------------------------------------------------------------- a profile

    def on_signal(self, frame: FrameType | None) -> None:
        """Called in the main thread at the first signal, with the interrupted frame: handle pending requests."""
        if os.getpid() != self._pid:
            return  # a process that the program has forked
        if not self._thread:
            from _socket import MSG_DONTWAIT, socket

            end = socket(fileno=os.dup(self._fd))
            try:
                for line in end.recv(4096, MSG_DONTWAIT).splitlines():
                    self.on_request() if line == b"n" else self._handle_profile(line, frame)
            except OSError:
                pass  # no request: only the stacks
            finally:
                end.close()
        if self._sampler:
            self._sampler.start(frame)

    def _handle_profile(self, line: bytes, frame: FrameType | None = None) -> None:
        """Start or end a profile. Without a frame it is called in the thread; the main thread registers the signal."""
        try:
            if not (self._stacks and _signals_left(*self._stacks[:2])):
                return
            if line[:1] == b"p":
                self._sampler = (
                    self._sampler or self._load_module("features/profile/rank/profile_sampler").ProfileSampler()
                )
                self._sampler.prepare(line)
                if not frame:
                    _signal.pthread_kill(self._main, self._stacks[0])
            elif self._sampler:
                traces = [] if frame else self._state.traces(details=True)
                self._sampler.write_result(frame or sys._current_frames().get(self._main), traces)
        except Exception:
            pass  # the disk is full


class _CallOnce:
    """Replaces ``init_process_group`` up to its first call, without a frame of its own on that call's stack.

    The interpreter looks ``__call__`` up before a call, and the property acts then (slot_tp_call in
    Objects/typeobject.c).
    """

    def __init__(self, cell: CellType, function: Callable[..., Any], callback: Callable[[], None]) -> None:
        self._cell, self._function, self._callback = cell, function, callback
        self.__name__ = function.__name__

    @property
    def __call__(self) -> Callable[..., Any]:
        self._cell.cell_contents = self._function
        try:
            self._callback()
        except Exception:
            pass  # no thread can be started: only stacks are available then
        return self._function


def call_after_import(name: str, attribute: str, callback: Callable[[ModuleType], None]) -> None:
    """Call back with a module: now or, if the program has not imported it yet, once it has that attribute."""
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
        module = sys.modules.get(self.module)
        if module is None or not hasattr(module, self._attribute):
            return None
        sys.meta_path.remove(self)
        for callback in self.callbacks:
            try:
                callback(module)
            except Exception:
                pass
        return _find_spec(name, path, target)  # sys.meta_path has shrunk while it was being iterated


_stacks_fd = -1
_endpoint: InspectionEndpoint | None = None


def _register_stacks() -> tuple[int, int, int, int] | None:
    """Choose two signals and a memfd for the stacks, and a third signal, without a handler yet (0 if none is free).

    Returns None if the system lacks real-time signals or memfds.
    """
    global _stacks_fd
    if not (hasattr(_signal, "SIGRTMIN") and hasattr(os, "memfd_create")):
        return None
    blocked = _signal.pthread_sigmask(_signal.SIG_BLOCK, [])
    numbers = range(_signal.SIGRTMIN, _signal.SIGRTMAX + 1)
    free = [n for n in numbers if n not in blocked and _signal.getsignal(n) == _signal.SIG_DFL]
    if len(free) < 2:
        return None
    first, second = free[:2]
    third = free[-1] if len(free) > 2 else 0  # the last one: the debugger uses the next free one
    memfd = os.memfd_create("ddplaunch-stacks")
    try:
        _stacks_fd = fd = _move_fd_high(os.open(f"/proc/self/fd/{memfd}", os.O_WRONLY | os.O_APPEND))
    finally:
        os.close(memfd)
    _signal.signal(first, _write_stacks)
    _signal.siginterrupt(first, False)  # system calls of the program must not fail with EINTR
    # faulthandler restores this handler at the interpreter's end: a late signal must not kill the process.
    _signal.signal(second, _signal.SIG_IGN)
    faulthandler.register(second, file=fd, all_threads=True, chain=False)
    return first, second, fd, third


def _signals_left(first: int, second: int) -> int:
    """The number of the two signals that still have our handler; the kernel shows only that some handler is set.

    0 if only the second has: it is safe only when Python did not react to the first.
    """
    if _signal.getsignal(first) is not _write_stacks:
        return 0
    return 2 if _signal.getsignal(second) == _signal.SIG_IGN else 1


def _write_stacks(number: int, frame: FrameType | None) -> None:
    try:
        if _endpoint:
            _endpoint.on_signal(frame)
        os.write(_stacks_fd, b"\0")  # a safe delimiter: faulthandler writes none, whatever names it prints
        faulthandler.dump_traceback(_stacks_fd, all_threads=True)
        outer = _outer_frames(frame, _FAULTHANDLER_FRAMES - 1)  # one less: the dump includes this function
        os.write(_stacks_fd, outer + _format_waiting_tasks(frame) + b"\0")
    except Exception:
        pass  # the program has closed it


def _outer_frames(frame: FrameType | None, skipped: int) -> bytes:
    """Format the outer frames of the main thread that ``faulthandler`` omits, in its format.

    Without them a stack that is deep in a library shows no line of the user's code.
    """
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    outer = frames[skipped:][-_MAX_OUTER_FRAMES:]
    lines = [f'  File "{each.f_code.co_filename}", line {each.f_lineno} in {each.f_code.co_name}' for each in outer]
    return _dump_section("Outer frames", lines) if lines else b""


def _format_waiting_tasks(frame: FrameType | None) -> bytes:
    """Format the stacks of waiting asyncio tasks like thread stacks: the thread's own stack shows only the loop.

    The first is the task that the loop runs until complete, with the chain that it awaits. Empty while a task is
    running: it is on the thread's stack.
    """
    asyncio = sys.modules.get("asyncio")
    try:
        loop = asyncio and asyncio._get_running_loop()
        if asyncio is None or loop is None or asyncio.current_task(loop) is not None:
            return b""
        pending = sorted(asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name()))
        main = _awaited_task(asyncio, frame) or (pending[0] if len(pending) == 1 else None)
        chain = _await_chain(main)
        others = [task for task in pending if task not in chain][:_MAX_TASKS]
        sections = [("Main task", chain)] * bool(chain) + [("Task", [task]) for task in others]
        return b"".join(_format_task(f"{head} [{tasks[-1].get_name()}]", tasks) for head, tasks in sections)
    except Exception:
        return b""  # another event loop implementation


def _awaited_task(asyncio: ModuleType, frame: FrameType | None) -> Any:
    """Find the task that ``asyncio.run`` or ``run_until_complete`` waits for, also with a loop written in C."""
    folder = os.path.dirname(asyncio.__file__ or "")
    while frame is not None:
        name = {"run_until_complete": "future", "run": "task"}.get(frame.f_code.co_name)
        if name and os.path.dirname(frame.f_code.co_filename) == folder:
            found = frame.f_locals.get(name)
            if hasattr(found, "get_coro"):
                return found
        frame = frame.f_back
    return None


def _await_chain(task: Any) -> list[Any]:
    """The chain of awaited tasks, innermost first, ending with ``task``; of gathered ones, the only unfinished one."""
    chain: list[Any] = []
    while hasattr(task, "get_coro") and task not in chain:
        chain.insert(0, task)
        task = getattr(task, "_fut_waiter", None)
        left = [each for each in getattr(task, "_children", ()) if not each.done()]
        task = left[0] if len(left) == 1 else task
    return chain


def _format_task(head: str, tasks: list[Any]) -> bytes:
    lines = []
    for task in tasks:
        calls: list[str] = []
        at = task.get_coro()
        while at is not None and len(calls) < _MAX_CALLS:
            kind = next((each for each in ("cr", "gi", "ag") if hasattr(at, f"{each}_frame")), "")
            if found := getattr(at, f"{kind}_frame", None):
                code = found.f_code
                calls.insert(0, f'  File "{code.co_filename}", line {found.f_lineno} in {code.co_name}')
            at = getattr(at, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
        lines += calls
    return _dump_section(head, lines)


def _dump_section(head: str, lines: list[str]) -> bytes:
    text = [line.replace("\n", " ").replace("\0", " ") for line in (f"{head} (most recent call first):", *lines)]
    return "\n".join([*text, ""]).encode("ascii", "backslashreplace")


def _move_fd_high(fd: int) -> int:
    """Move a descriptor to a high number, out of the way of programs that close or count their descriptors."""
    for number in range(min(os.sysconf("SC_OPEN_MAX"), _MAX_FD) - 1, fd, -1):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(fd, number, inheritable=False)
            os.close(fd)
            return number
    return fd
