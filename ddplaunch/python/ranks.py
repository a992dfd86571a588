"""What runs in a rank that a program has launched: it calls the functions that it is sent, one after the other."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from typing import Any

from ddplaunch.python import parcel

CALLS = "calls"
"""The socket in a session's folder at which its ranks wait; without it there is one call."""

DONE, AGAIN = b"d", b"c"


def serve(folder: str) -> None:
    """Do the calls of one launch, or of a session, whose files are in ``folder``."""
    rank = os.environ["RANK"]
    sys.path[:] = parcel.load(os.path.join(folder, "path"))
    waiting = os.path.join(folder, CALLS)
    if not os.path.exists(waiting):
        return _do(folder, 0, rank)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(waiting)
        line.sendall(b"".join(int(os.environ[name]).to_bytes(4, "big") for name in ("RANK", "WORLD_SIZE")))
        number = 0
        while line.recv(1) == AGAIN:
            _do(folder, number, rank)
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):  # closed
                    stream.flush()
            line.sendall(DONE)
            number += 1


def _do(folder: str, number: int, rank: str) -> None:
    """Call one function, and leave what it returned, or its exception."""
    result = os.path.join(folder, f"{number}.{rank}")
    try:
        function, args = parcel.load(os.path.join(folder, f"call.{number}"))
        value = function(*args)
    except Exception as error:
        _keep(error, f"{result}.raised")
        raise
    try:
        parcel.dump((int(os.environ["WORLD_SIZE"]), value), result)
    except OSError:
        raise
    except Exception as error:
        what = f"rank {rank} returned {type(value).__name__}, which cannot be pickled: {error}"
        failure = TypeError(what)
        _keep(failure, f"{result}.raised")
        raise failure from None


def _keep(error: Exception, path: str) -> None:
    """Leave an exception for the caller; where it cannot travel, the report's text has to do."""
    kept: Any = error
    try:
        parcel.dump(kept, path)
        parcel.load(path)  # some pickle and do not unpickle
    except Exception:
        try:
            os.unlink(path)
        except OSError:
            pass
