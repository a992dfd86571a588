"""Where the tasks of asyncio wait. Part of the worker, loaded when stacks are asked for and there is an asyncio."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, ModuleType
    from typing import Any

_MAX_TASKS, _MAX_CALLS = 32, 100


def tasks(asyncio: ModuleType, frame: FrameType | None) -> bytes:
    """Where the tasks of asyncio wait, as faulthandler has it of threads: on the thread's stack is the loop alone.

    The first is that which the loop runs for, with what it awaits in turn. Nothing where a task is at work: it is on
    the stack.
    """
    try:
        loop = asyncio._get_running_loop()
        if loop is None or asyncio.current_task(loop) is not None:
            return b""
        pending = sorted(asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name()))
        main = _awaited_task(asyncio, frame) or (pending[0] if len(pending) == 1 else None)
        chain = _chain(main)
        others = [task for task in pending if task not in chain][:_MAX_TASKS]
        told = [("Main task", chain)] * bool(chain) + [("Task", [task]) for task in others]
        return b"".join(_task(f"{head} [{tasks[-1].get_name()}]", tasks) for head, tasks in told)
    except Exception:
        return b""  # a loop of another make


def _awaited_task(asyncio: ModuleType, frame: FrameType | None) -> Any:
    """The task that ``asyncio.run`` or ``run_until_complete`` waits for, also where the loop is written in C."""
    folder = os.path.dirname(asyncio.__file__ or "")
    while frame is not None:
        name = {"run_until_complete": "future", "run": "task"}.get(frame.f_code.co_name)
        if name and os.path.dirname(frame.f_code.co_filename) == folder:
            found = frame.f_locals.get(name)
            if hasattr(found, "get_coro"):
                return found
        frame = frame.f_back
    return None


def _chain(task: Any) -> list[Any]:
    """A task, before it the one that it awaits, and so on; of several that it has gathered the only one left."""
    chain: list[Any] = []
    while hasattr(task, "get_coro") and task not in chain:
        chain.insert(0, task)
        task = getattr(task, "_fut_waiter", None)
        left = [each for each in getattr(task, "_children", ()) if not each.done()]
        task = left[0] if len(left) == 1 else task
    return chain


def _task(head: str, tasks: list[Any]) -> bytes:
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
    text = [line.replace("\n", " ").replace("\0", " ") for line in (f"{head} (most recent call first):", *lines)]
    return "\n".join([*text, ""]).encode("ascii", "backslashreplace")
