"""The program of the ranks of ``launch`` and ``Session``: calls the functions that the caller sends."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddplaunch.features.python import pickle_files
from ddplaunch.features.python.arguments import bind_call
from ddplaunch.system.target.signature import ArgumentValues

if TYPE_CHECKING:
    from ddplaunch.core.failures import RankFailure

HIDES_FRAMES = True
"""For ``rank_exit.py``: of an exception that has no frames of the user's code, the message is enough."""

CALL_SOCKET = "calls"
"""The socket in a session's folder to which its ranks connect; without it there is a single call."""

RETURNED, RAISED = b"d", b"e"
"""Replies to a call. After either reply the rank waits for the next call."""

CALL, CALL_QUIETLY, CALL_OR_END = b"c", b"q", b"r"
"""Requests for a call. If the function raises, the rank prints the traceback; prints nothing; fails, in this order."""

_EXIT_EXCEPTIONS = (SystemExit, KeyboardInterrupt)
"""Exceptions that end a rank."""

_name_of, _trace_of = type.__dict__["__name__"].__get__, BaseException.__dict__["__traceback__"].__get__
"""Read an exception's name and traceback, even if its class overrides them."""

_OWN_DIR = os.path.dirname(__file__) + os.sep


@contextmanager
def short_socket_path(folder: str) -> Iterator[str]:
    """Yield a path of the call socket that fits into the 108 bytes of a socket address, however deep TMPDIR is."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{CALL_SOCKET}"
    finally:
        os.close(fd)


@dataclass(frozen=True)
class RaisedException:
    """An exception that a function raised in a rank."""

    pid: int
    moment: float  # seconds since the epoch
    message: str  # "ValueError: no luck"
    traceback: str  # as Python prints it, without ddplaunch's frames
    error: BaseException | None  # None if it cannot be pickled

    def to_failure(self, rank: int) -> RankFailure:
        """Convert to the failure of a rank on this machine, with exit code 1."""
        from ddplaunch.core.failures import RankFailure  # needed in the caller only

        return RankFailure(
            rank=rank,
            local_rank=rank,
            host=socket.gethostname(),
            pid=self.pid,
            attempt=0,
            exit_code=1,
            signal=None,
            message=self.message,
            traceback=self.traceback,
            moment=self.moment,
            hint=None,
        )


def run_calls(
    folder: str,
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    node_rank: int,
    nnodes: int,
    device: str,
) -> None:
    """Run the call of a ``launch``, or the calls of a session; ``folder`` has their files."""
    values = ArgumentValues(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        nnodes=nnodes,
        world_size=world_size,
        local_world_size=local_world_size,
        device=device,
    )
    sys.path[:] = pickle_files.load(os.path.join(folder, "path"))
    path = os.path.join(folder, CALL_SOCKET)
    if not os.path.exists(path):
        return _call(folder, 0, values)
    with socket.socket(socket.AF_UNIX) as connection:
        with short_socket_path(folder) as short:
            connection.connect(short)
        connection.sendall(b"".join(each.to_bytes(4, "big") for each in (rank, world_size)))
        number = 0
        while request := connection.recv(1):
            reply = RETURNED
            try:
                _call(folder, number, values)
            except _EXIT_EXCEPTIONS:
                raise
            except BaseException as error:
                if request == CALL_OR_END:
                    raise
                if request == CALL:
                    _print(error)
                reply = RAISED
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):  # closed
                    stream.flush()
            connection.sendall(reply)
            number += 1


def _call(folder: str, number: int, values: ArgumentValues) -> None:
    """Call one function, and write its result or exception to a file."""
    path = os.path.join(folder, f"{number}.{values['rank']}")
    try:
        function, args = pickle_files.load(os.path.join(folder, f"call.{number}"))
        value = _run(function, args, values)
    except _EXIT_EXCEPTIONS:
        raise
    except BaseException as error:
        _write_raised(error, f"{path}.raised")
        raise
    try:
        pickle_files.dump((values["world_size"], value), path)
    except OSError:
        raise
    except Exception as error:
        what = f"rank {values['rank']} returned {type(value).__name__}, which cannot be pickled: {error}"
        failure = TypeError(what)
        _write_raised(failure, f"{path}.raised")
        raise failure from None


def _run(function: Callable[..., object], args: tuple[object, ...], values: ArgumentValues) -> object:
    positional, named = bind_call(function, args, values, _make_device)
    return function(*positional, **named)


def _make_device(name: str) -> object:
    import torch

    return torch.device(name)


def _print(error: BaseException) -> None:
    """Print a traceback as the interpreter would at the end of a program."""
    _strip_own_frames(error)
    try:
        sys.excepthook(type(error), error, _trace_of(error))
    except Exception:
        print(_format_traceback(error), end="", file=sys.stderr)


def _format_traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, _trace_of(error)))
    except BaseException:  # its class overrides what the traceback module reads
        return "".join([*traceback.format_tb(_trace_of(error)), _message(error), "\n"])


def _strip_own_frames(error: BaseException) -> None:
    """Remove ddplaunch's frames from the beginning of a traceback."""
    trace = _trace_of(error)
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN_DIR):
        trace = trace.tb_next
    BaseException.with_traceback(error, trace)


def _write_raised(error: BaseException, path: str) -> None:
    """Write an exception for the caller; only its text if it cannot be pickled."""
    full_traceback = _trace_of(error)
    _strip_own_frames(error)
    text = _format_traceback(error)
    BaseException.with_traceback(error, full_traceback)
    raised = RaisedException(os.getpid(), time.time(), _message(error), text, error)
    try:
        pickle_files.dump(raised, path)
        pickle_files.load(path)  # some exceptions can be pickled but not unpickled
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        with suppress(Exception):  # the launcher has the exception's text, too
            pickle_files.dump(replace(raised, error=None), path)


def _message(error: BaseException) -> str:
    name: str = _name_of(type(error))
    try:
        text = str.__str__(str(error))
    except BaseException:
        text = "<exception str() failed>"
    return f"{name}: {text}" if text else name
