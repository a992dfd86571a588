"""``Session``: ranks that keep their state between calls of functions."""

from __future__ import annotations

import contextvars
import os
import selectors
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar

from ddplaunch.base.errors import LaunchError, UsageError
from ddplaunch.base.text import format_ranks
from ddplaunch.features.python import pickle_files
from ddplaunch.features.python.arguments import check_call
from ddplaunch.features.python.keywords import Keywords
from ddplaunch.features.python.launched_job import LaunchedJob, RankFailed
from ddplaunch.features.python.rank.call_loop import CALL, CALL_OR_END, CALL_QUIETLY, RAISED, short_socket_path

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


RAISED_TIMEOUT_S = 3.0
"""After one rank has raised, the others must return or raise within this time; else they are assumed to wait for it."""

_QUIET_TIMEOUT_S = 1.0
"""The same time for a pytest test: after a test that fails, new ranks are started anyway."""

T = TypeVar("T")


class Session:
    """Ranks on this machine that keep their process group and state between calls.

        with Session(nproc=4) as session:
            session.run(setup)
            for lr in (0.1, 0.01):
                print(session.run(train, lr))

    A function that raises does not end the ranks, if all ranks return or raise. Any other failure does;
    ``restart=True`` then starts new ranks for the next call. Calls from several threads run one after another.
    """

    def __init__(self, *, restart: bool = False, output: IO[str] | None = None, **keywords: Unpack[Keywords]) -> None:
        """Keywords are the options of ``ddplaunch run``; the ranks start with the first call.

        Raises UsageError for a keyword that involves other machines.
        """
        for name in ("hosts", "hostfile", "nnodes", "node_rank", "spares"):
            if keywords.get(name):
                raise UsageError(f"{name} does not work with Session: its ranks are on this machine", "use launch()")
        self._keywords: Any = keywords
        self._restart, self._output = restart, output
        self._lock = threading.RLock()  # a signal handler may close the session during a call
        self.request = CALL_OR_END if keywords.get("post_mortem") else CALL
        """What ranks do when a function raises; with ``post_mortem`` a rank must fail, to enter the debugger."""
        self.on_note: Callable[[int, str], bool] | None = None  # see LaunchedJob.set_note_handler
        self._ranks: _SessionRanks | None = None
        self._ended = False
        self._owner: int | None = None  # PID of the process that made the first call

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, function: Callable[..., T], *args: object, timeout: float | None = None) -> list[T]:
        """Call a function in every rank, and return the results in order of ranks.

        Args:
            function: as for ``launch``; parameters named ``rank``, ``world_size``, … get the rank's values.
            timeout: seconds from when all ranks are ready; after it the ranks are stopped.

        Raises:
            UsageError: the function does not take these arguments.
            RankFailed: a rank failed; the exception that it raised is the ``__cause__``.
            LaunchError: the function or an argument cannot be pickled; the ranks did not start, were stopped, or took
                too long; or the session has ended, or belongs to another process.
        """
        __tracebackhide__ = True
        check_call(function, args)
        self._owner = self._owner or os.getpid()
        if self._is_in_fork():
            what = f"the session belongs to process {self._owner}, and this is a fork of it (PID {os.getpid()})"
            raise LaunchError(what, "create a Session here, or call it in that process")
        with self._lock:
            if self._ended:
                what = "the session has ended: create a new one"
                raise LaunchError(what, "Session(restart=True) starts new ranks after a failure")
            if self._ranks is None:
                self._ranks = _SessionRanks(function, self._keywords, self._output, self.on_note)
                weakref.finalize(self, self._ranks.close)  # at the latest at the interpreter's exit
            current = self._ranks
            current.prepare(function, args)
            try:
                return current.run_call(timeout, self.request)
            except BaseException:
                if not current.ready:
                    self._ranks = None  # first, as Ctrl-C may interrupt the rest
                    self._ended |= not self._restart
                    try:
                        current.stop()
                    finally:
                        current.close()
                    if self.request == CALL and current.started:
                        then = "; the next call starts new ones" if self._restart else ""
                        current.print(f"the ranks have ended; their variables are lost{then}")
                raise

    def close(self) -> None:
        """End the ranks, and wait until all their processes have ended; in a fork of the caller nothing happens."""
        if self._is_in_fork():
            return
        self._ended = True
        self._close_ranks()
        with self._lock:  # a call in another thread may still stop its ranks, or have just created them
            self._close_ranks()

    def _is_in_fork(self) -> bool:
        """Whether this process is a fork of the one that uses the session, to which the ranks and the lock belong."""
        return self._owner not in (None, os.getpid())

    def _close_ranks(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()


class _SessionRanks:
    """The ranks of a session, from one start to their end."""

    def __init__(
        self,
        function: Callable[..., object],
        keywords: Any,
        output: IO[str] | None,
        on_note: Callable[[int, str], bool] | None,
    ) -> None:
        self._pid = os.getpid()
        self._job = LaunchedJob(function, keywords, output)
        if on_note is not None:
            self._job.set_note_handler(on_note)
        self._listener = socket.socket(socket.AF_UNIX)
        self._connections: dict[int, socket.socket] = {}
        self._calls = 0
        self.ready = False
        """Whether all ranks wait for the next call."""
        try:
            with short_socket_path(self._job.folder) as path:
                self._listener.bind(path)
            self._listener.listen(4096)
        except BaseException:
            self.close()
            raise

    @property
    def started(self) -> bool:
        """Whether all ranks have connected."""
        return bool(self._connections)

    def prepare(self, function: Callable[..., object], args: tuple[object, ...]) -> None:
        """Write the next call to a file. Raises LaunchError if it cannot be pickled; the ranks are unaffected then."""
        __tracebackhide__ = True
        pickle_files.dump_call(function, args, self._job.path(f"call.{self._calls}"))

    def run_call(self, timeout_s: float | None, request: bytes) -> list[Any]:
        """Run the prepared call; ``request``: CALL, CALL_QUIETLY or CALL_OR_END of call_loop.py."""
        __tracebackhide__ = True
        number = self._calls
        self._job.printer.context = contextvars.copy_context()  # output goes to the caller: the cell of a notebook
        if not self._connections:
            self._job.start()
            self._accept_ranks()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._calls += 1
        self.ready = False
        for connection in self._connections.values():
            with suppress(OSError):  # the rank's end is noticed below
                connection.sendall(request)
        raised_timeout_s = _QUIET_TIMEOUT_S if request == CALL_QUIETLY else RAISED_TIMEOUT_S
        raised, waiting = self._wait_for_replies(deadline, raised_timeout_s)
        if waiting and request != CALL_QUIETLY:
            waits = self._job.describe_waits()
            text = f"{format_ranks(waiting)} did not return within {raised_timeout_s:g} s after rank {raised[0]} raised"
            self.print(f"{text}: {waits}" if waits else text)
        if waiting:
            raise self._job.make_raised_error(number, raised, len(waiting))
        self._job.flush()
        outcome = self._job.make_raised_error(number, raised, 0) if raised else self._job.results(number)
        self.ready = True
        if isinstance(outcome, RankFailed):
            self._job.discard(number)
            raise outcome
        return outcome

    def print(self, text: str) -> None:
        """Print a message of ddplaunch to where the ranks' stderr goes."""
        self._job.printer.print(f"ddplaunch: {text}\n", "stderr")

    def _accept_ranks(self) -> None:
        """Accept the connections of all ranks; each sends its rank and the world size."""
        __tracebackhide__ = True
        size = 1
        while len(self._connections) < size:
            self._wait([self._listener], None)
            connection, _ = self._listener.accept()
            rank, size = (int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big") for _ in range(2))
            self._connections[rank] = connection

    def _wait(self, sockets: Collection[socket.socket], deadline: float | None) -> list[socket.socket]:
        """Wait for readable sockets, and return them; return none at the deadline. Raises if the job ends."""
        __tracebackhide__ = True
        with selectors.DefaultSelector() as selector:
            for each in (*sockets, self._job.end_socket):
                selector.register(each, selectors.EVENT_READ)
            timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = [key.fileobj for key, _ in selector.select(timeout_s)]
        if self._job.end_socket in ready:
            self._raise_job_error()
        return [each for each in sockets if each in ready]

    def _wait_for_replies(self, deadline: float | None, raised_timeout_s: float) -> tuple[list[int], list[int]]:
        """Wait until all ranks have finished the call, or one has raised and ``raised_timeout_s`` is over.

        Return the ranks that raised, and those that have not finished. Raises LaunchError at the deadline.
        """
        __tracebackhide__ = True
        waiting = {connection: rank for rank, connection in self._connections.items()}
        raised: list[int] = []
        end = deadline
        while waiting:
            ready = self._wait(waiting, end)
            if not ready and raised:
                return raised, sorted(waiting.values())
            if not ready:
                waits = self._job.describe_waits()
                raise LaunchError("the call timed out" + (f": {waits}" if waits else ""))
            for connection in ready:
                reply = b""
                with suppress(OSError):
                    reply = connection.recv(1)
                if not reply:  # the rank has ended, and the launcher knows why
                    self._raise_job_error()
                rank = waiting.pop(connection)
                if reply == RAISED:
                    raised.append(rank)
                    raised_end = time.monotonic() + raised_timeout_s
                    end = end if len(raised) > 1 else raised_end if deadline is None else min(deadline, raised_end)
        return raised, []

    def _raise_job_error(self) -> NoReturn:
        """Raise the error with which the job has ended."""
        __tracebackhide__ = True
        self._job.wait_for_success(max(0, self._calls - 1))
        raise LaunchError("the ranks have ended")

    def stop(self) -> None:
        """Stop ranks that are still in a call."""
        self._job.stop(signal.SIGINT)

    def close(self) -> None:
        if os.getpid() != self._pid:  # a fork of the caller, which does not own the ranks
            return
        for each in (*self._connections.values(), self._listener):
            each.close()
        try:
            if self._job.has_started and not self._job.wait(5.0):
                self._job.stop()
        finally:
            self._job.remove_dir()
