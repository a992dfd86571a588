"""Lets the new interpreters that a rank starts (``spawn``, ``forkserver``) dump their stacks.

A forked child inherits the signal handlers. A new interpreter gets them with the settings that multiprocessing copies
from each process to its children: one more setting installs them when it is unpickled, before the target is called.
It runs in ranks, by the rules of ``core/rank/rank_runner.py``.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

MODULE = "multiprocessing.process"
LAST_NAME = "_dangling"
"""The last name that the module defines."""

_SETUP = """
def setup(parent, first, second, fd):
    import _signal, atexit, faulthandler, os
    if os.getpid() == parent or {_signal.getsignal(first), _signal.getsignal(second)} != {_signal.SIG_DFL}:
        return
    try:
        os.fstat(fd)
        return
    except OSError:
        pass
    memfd = os.memfd_create("ddplaunch-stacks")
    stacks = os.open(f"/proc/self/fd/{memfd}", os.O_WRONLY | os.O_APPEND)
    os.dup2(stacks, fd, inheritable=False)
    os.close(stacks)
    os.close(memfd)

    def write_stacks(number, frame):
        try:
            os.write(fd, bytes(1))
            faulthandler.dump_traceback(fd, all_threads=True)
            os.write(fd, bytes(1))
        except Exception:
            pass

    _signal.signal(first, write_stacks)
    _signal.siginterrupt(first, False)
    _signal.signal(second, _signal.SIG_IGN)
    faulthandler.register(second, file=fd, all_threads=True, chain=False)
    atexit.register(_signal.signal, first, _signal.SIG_IGN)  # its default, restored at the end, kills


try:
    setup(*arguments)
except Exception:
    pass
"""


class _Setup:
    """An object that is pickled as a call, which sets up the process that unpickles it."""

    def __init__(self, *arguments: int) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[object, ...]:
        names = {"text": _SETUP, "file": __file__, "arguments": self._arguments}
        return exec, ("exec(compile(text, file, 'exec'))", names)  # frames of this file are left out of a stack


def prepare_children(module: ModuleType, first: int, second: int, fd: int) -> None:
    """Make children of this process dump their stacks on two signals, to descriptor ``fd``: each to a file of its own.

    ``module`` is multiprocessing.process.
    """
    module._current_process._config["ddplaunch"] = _Setup(os.getpid(), first, second, fd)
