"""What runs in a rank that a program has launched: it calls the functions that it is sent, one after the other."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddplaunch.python import parcel
from ddplaunch.python.arguments import bind_call

if TYPE_CHECKING:
    from ddplaunch.control.failure import RankFailure

CALL_SOCKET = "calls"
"""The socket in a session's folder at which its ranks wait; without it there is one call."""

RETURNED, RAISED = b"d", b"e"
"""Replies to a call. After either the rank waits for the next one."""

CALL, CALL_QUIETLY, CALL_OR_END = b"c", b"q", b"r"
"""Requests for a call. A function that raises: its traceback is printed; it is not printed; the rank fails with it."""

_ENDS = (SystemExit, KeyboardInterrupt)
"""Exceptions that end a rank."""

_OURS = os.path.dirname(__file__) + os.sep


@dataclass(frozen=True)
class RaisedException:
    """An exception that a function raised in a rank."""

    pid: int
    moment: float  # seconds since the epoch
    message: str  # "ValueError: no luck"
    traceback: str  # as Python prints it, the caller's frames only
    error: BaseException | None  # None where it cannot be pickled

    def to_failure(self, rank: int) -> RankFailure:
        """The same as the failure of a rank on this machine, with exit code 1."""
        from ddplaunch.control.failure import RankFailure  # only the caller needs it

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
    """Do the calls of one launch, or of a session, whose files are in ``folder``."""
    facts = {
        "rank": rank,
        "local_rank": local_rank,
        "world_size": world_size,
        "local_world_size": local_world_size,
        "node_rank": node_rank,
        "nnodes": nnodes,
        "device": device,
    }
    sys.path[:] = parcel.load(os.path.join(folder, "path"))
    path = os.path.join(folder, CALL_SOCKET)
    if not os.path.exists(path):
        return _call(folder, 0, facts)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(b"".join(each.to_bytes(4, "big") for each in (rank, world_size)))
        number = 0
        while request := connection.recv(1):
            reply = RETURNED
            try:
                _call(folder, number, facts)
            except _ENDS:
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


def _call(folder: str, number: int, facts: dict[str, Any]) -> None:
    """Call one function, and write down what it returned, or its exception."""
    path = os.path.join(folder, f"{number}.{facts['rank']}")
    try:
        function, args = parcel.load(os.path.join(folder, f"call.{number}"))
        value = _run(function, args, facts)
    except _ENDS:
        raise
    except BaseException as error:
        _write_raised(error, f"{path}.raised")
        raise
    try:
        parcel.dump((facts["world_size"], value), path)
    except OSError:
        raise
    except Exception as error:
        what = f"rank {facts['rank']} returned {type(value).__name__}, which cannot be pickled: {error}"
        failure = TypeError(what)
        _write_raised(failure, f"{path}.raised")
        raise failure from None


def _run(function: Callable[..., object], args: tuple[object, ...], facts: dict[str, Any]) -> object:
    given, named = bind_call(function, args, facts, _device)
    return function(*given, **named)


def _device(name: str) -> object:
    import torch

    return torch.device(name)


def _print(error: BaseException) -> None:
    """Print a traceback as the interpreter would at the end of a program."""
    _trim(error)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:
        traceback.print_exception(type(error), error, error.__traceback__)


def _trim(error: BaseException) -> None:
    """Take the frames of this file off the beginning of a traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    error.__traceback__ = trace


def _write_raised(error: BaseException, path: str) -> None:
    """Write an exception for the caller; where it cannot be pickled, only its text."""
    own = error.__traceback__
    _trim(error)
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    error.__traceback__ = own
    raised = RaisedException(os.getpid(), time.time(), _message(error), text, error)
    try:
        parcel.dump(raised, path)
        parcel.load(path)  # some pickle and do not unpickle
    except Exception:
        with suppress(OSError):
            os.unlink(path)
        with suppress(OSError):
            parcel.dump(replace(raised, error=None), path)


def _message(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        text = "<exception str() failed>"
    return f"{name}: {text}" if text else name
