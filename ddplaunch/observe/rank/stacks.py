"""Writes the stacks of a rank on request, whatever its program is doing.

They are requested by one of two signals, on which ``faulthandler`` writes those of all threads to a memfd. On the
first, a Python handler runs between two instructions. On the second faulthandler writes at once, even while a thread
holds the GIL: it is for a main thread in native code only, because a frame in the middle of a call would be read
halfway, which can crash Python 3.11 and 3.12. Only the output of the first is enclosed in two zero bytes.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]  # signal without its enums
import faulthandler
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, ModuleType
    from typing import Any

    from ddplaunch.core.rank import inspection_endpoint
    from ddplaunch.core.rank.inspection_endpoint import InspectionEndpoint
    from ddplaunch.core.rank.rank_runner import load_private_module
else:
    inspection_endpoint = load_private_module("core/rank/inspection_endpoint")

MAX_FRAMES = 100  # MAX_FRAME_DEPTH in Python/traceback.c: faulthandler writes the innermost frames only
_MAX_TASKS, _MAX_CALLS = 32, 100
_MAX_OUTER_FRAMES = 500


class StackWriter:
    """The two signals that write stacks, and the memfd that they write to; all are 0 if not available."""

    def __init__(self, endpoint: InspectionEndpoint) -> None:
        """Choose two free signals, and handle them; the first also wakes the main thread for other requests."""
        global _writer
        _writer = self
        self.first = self.second = self.fd = 0
        self.endpoint = endpoint
        free = inspection_endpoint.list_free_signals()
        if len(free) < 2 or not hasattr(os, "memfd_create"):
            return
        memfd = os.memfd_create("ddplaunch-stacks")
        try:
            self.fd = inspection_endpoint.move_fd_high(os.open(f"/proc/self/fd/{memfd}", os.O_WRONLY | os.O_APPEND))
        finally:
            os.close(memfd)
        self.first, self.second = free[:2]
        _signal.signal(self.first, _write_stacks)
        _signal.siginterrupt(self.first, False)  # system calls of the program must not fail with EINTR
        # faulthandler restores this handler at the interpreter's end: a late signal must not kill the process.
        _signal.signal(self.second, _signal.SIG_IGN)
        faulthandler.register(self.second, file=self.fd, all_threads=True, chain=False)
        endpoint.wake_signal, endpoint.can_wake = self.first, self._handles_first_signal

    def _handles_first_signal(self) -> bool:
        return _signal.getsignal(self.first) is _write_stacks

    def count_handled_signals(self) -> int:
        """Return how many of the two signals still have our handler; the kernel only shows that some handler is set.

        0 if only the second has: it is safe only when Python did not react to the first.
        """
        if not self._handles_first_signal():
            return 0
        return 2 if _signal.getsignal(self.second) == _signal.SIG_IGN else 1

    def stop(self) -> None:
        if self.first and self._handles_first_signal():
            _signal.signal(self.first, _signal.SIG_IGN)  # its default, restored at the interpreter's end, kills


_writer: StackWriter | None = None


def _write_stacks(number: int, frame: FrameType | None) -> None:
    """Signal handler that writes all stacks to the memfd; a plain function, because the program can see it."""
    trace = inspection_endpoint.suspend_tracing()
    try:
        assert _writer is not None
        _writer.endpoint.wake(frame)
        before = os.fstat(_writer.fd).st_size
        os.write(_writer.fd, b"\0")  # a safe delimiter: faulthandler writes none, whatever names it prints
        faulthandler.dump_traceback(_writer.fd, all_threads=True)
        outer = format_outer_frames(frame, MAX_FRAMES - 1)  # one less: the dump includes this function
        os.write(_writer.fd, outer + _format_waiting_tasks(frame) + b"\0")
        _writer.endpoint.bytes_written += max(0, os.fstat(_writer.fd).st_size - before)
    except Exception:
        pass  # the program has closed it
    finally:
        if trace is not None:
            sys.settrace(trace)


def format_outer_frames(frame: FrameType | None, skipped: int) -> bytes:
    """Format the outer frames of the main thread that ``faulthandler`` omits, in its format.

    Without them a stack that is deep in a library shows no line of the user's code.
    """
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    outer = frames[skipped:][-_MAX_OUTER_FRAMES:]
    lines = [f'  File "{each.f_code.co_filename}", line {each.f_lineno} in {each.f_code.co_name}' for each in outer]
    return _format_section("Outer frames", lines) if lines else b""


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
    """The chain of awaited tasks, innermost first, ending with ``task``; of gathered tasks, the only unfinished one."""
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
    return _format_section(head, lines)


def _format_section(head: str, lines: list[str]) -> bytes:
    text = [line.replace("\n", " ").replace("\0", " ") for line in (f"{head} (most recent call first):", *lines)]
    return "\n".join([*text, ""]).encode("ascii", "backslashreplace")
