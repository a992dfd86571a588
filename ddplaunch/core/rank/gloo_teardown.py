"""Prevents a deadlock or an abort inside torch when a program that uses gloo ends.

The rule of torch 2.13: a collective that was started in a backward pass, as DDP's are, holds a Python object
(``torch/autograd/graph.py`` stashes "context"), so gloo's thread needs the GIL to free it. The thread may be late, on a
busy machine by milliseconds. Two kinds of end do not wait for it:

- DDP's ``Reducer`` is freed, and has the last reference to its group. The group is destroyed with the GIL held, and its
  destructor joins the thread: a deadlock. A Python object of the group releases the GIL for that, so one is kept until
  the Reducer, and the Logger that shares it, are gone.
- The interpreter finalizes. The thread asks for the GIL and is ended, in a destructor: ``std::terminate``, SIGABRT.

Bound by the rules of ``rank_runner.py``.
"""

from __future__ import annotations

import sys
from _weakref import ref
from os import listdir
from time import monotonic, sleep  # kept: the program may replace what time has

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

_THREAD_NAME = "pt_gloo_runloop\n"  # ProcessGroupGloo::runLoop
_PAUSE_S = 0.0005
_TIMEOUT_S = 1.0


def hold_groups(_: ModuleType) -> None:
    """Make each Reducer and Logger of DDP hold a Python object of its group, now that torch.distributed is loaded."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    groups: dict[ref[Any], object] = {}

    def group_of(*values: Any) -> object:
        found = (groups.get(ref(each)) if type(each) is c10d.Reducer else each for each in values)
        return next((each for each in found if isinstance(each, c10d.ProcessGroup)), None)

    for owner in (getattr(c10d, "Reducer", None), getattr(c10d, "Logger", None)):
        if owner is not None:
            owner.__init__ = _wrap_init(owner.__init__, group_of, groups)


def _wrap_init(init: Any, group_of: Callable[..., object], groups: dict[ref[Any], object]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        group = group_of(*args, *named.values())
        if group is not None:
            groups[ref(self, groups.pop)] = group  # the weak reference calls ``pop`` after the C++ object is freed

    __init__.__doc__ = init.__doc__
    return __init__


def wait_for_threads() -> None:
    """Wait until gloo's threads have freed their objects: until all are asleep three times in a row."""
    tasks, asleep, deadline = _find_threads(), 0, monotonic() + _TIMEOUT_S
    while tasks and asleep < 3 and monotonic() < deadline:
        sleep(_PAUSE_S)
        asleep = 0 if any(_is_running(task) for task in tasks) else asleep + 1


def _find_threads() -> list[str]:
    """List the folders in /proc of gloo's threads in this process."""
    tasks = "/proc/self/task"
    try:
        return [f"{tasks}/{each}" for each in listdir(tasks) if _read(f"{tasks}/{each}/comm") == _THREAD_NAME]
    except OSError:
        return []  # no /proc, or no descriptor left


def _is_running(task: str) -> bool:
    return _read(f"{task}/stat").rpartition(")")[2].split()[:1] == ["R"]


def _read(path: str) -> str:
    """Read a file; "" if its thread has ended."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
