"""``Session``: ranks that stay, and are called again and again."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar

from ddplaunch.errors import LaunchError, UsageError
from ddplaunch.python import parcel
from ddplaunch.python.arguments import check_call
from ddplaunch.python.job import LaunchedJob
from ddplaunch.python.ranks import CALL, CALL_OR_END, CALL_QUIETLY, CALL_SOCKET, RAISED
from ddplaunch.words import format_ranks

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ddplaunch.python.keywords import Keywords

RAISED_TIMEOUT_S = 3.0
"""After one rank has raised, the time for the others to return or raise; then they are taken to wait for it."""

_QUIET_TIMEOUT_S = 1.0
"""The same for a test, whose ranks are made anew anyway."""

T = TypeVar("T")


class Session:
    """Ranks that keep their process group and state between calls, on this machine.

        with Session(nproc=4) as session:
            session.run(setup)
            for lr in (0.1, 0.01):
                print(session.run(train, lr))

    A function that raises does not end the ranks, if all of them return or raise. All other failures do;
    ``restart=True`` starts new ranks for the next call. Threads that share a session take turns.
    """

    def __init__(self, *, restart: bool = False, output: IO[str] | None = None, **keywords: Unpack[Keywords]) -> None:
        """Take the options of ``ddplaunch run`` as keywords; ranks start with the first call.

        Raises:
            UsageError: the job would have other machines than this one.
        """
        for name in ("hosts", "hostfile", "nnodes", "node_rank", "spares"):
            if keywords.get(name):
                raise UsageError(f"{name} does not work with Session: its ranks are on this machine", "use launch()")
        self._keywords: Any = keywords
        self._restart, self._output = restart, output
        self._lock = threading.Lock()
        self.request = CALL_OR_END if keywords.get("post_mortem") else CALL
        """What ranks do with a function that raises; the debugger waits in a rank that fails."""
        self.on_note: Callable[[int, str], bool] | None = None  # see LaunchedJob.listen
        self._ranks: _SessionRanks | None = None
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, function: Callable[..., T], *args: object, timeout: float | None = None) -> list[T]:
        """Call a function in every rank, and return what each returned, in order of ranks.

        Args:
            function: as for ``launch``; parameters called ``rank``, ``world_size``, … get the rank's own values.
            timeout: seconds from the moment when all ranks are ready; ranks that take longer are stopped.

        Raises:
            UsageError: the function does not take these arguments.
            RankFailed: a rank failed; what it raised is the ``__cause__``.
            LaunchError: the function or an argument cannot be pickled; the ranks did not start, were stopped, or took
                too long; or the session has ended.
        """
        __tracebackhide__ = True
        check_call(function, args)
        with self._lock:
            if self._ended:
                raise LaunchError(
                    "the session has ended: make a new one", "Session(restart=True) starts new ranks after a failure"
                )
            if self._ranks is None:
                self._ranks = _SessionRanks(function, self._keywords, self._output, self.on_note)
                weakref.finalize(self, self._ranks.close)  # at the end of the interpreter, at the latest
            current = self._ranks
            current.prepare(function, args)
            try:
                return current.run_call(timeout, self.request)
            except BaseException:
                if not current.ready:
                    current.stop()
                    self.close()
                    self._ended = not self._restart
                    if self.request == CALL and current.started:
                        then = "; the next call starts new ones" if self._restart else ""
                        current.print(f"the ranks have ended; their names are gone{then}")
                raise

    def close(self) -> None:
        """End the ranks, and wait until nothing is left of them."""
        ranks, self._ranks = self._ranks, None
        self._ended = True
        if ranks is not None:
            ranks.close()


class _SessionRanks:
    """The ranks of a session, from one start to one end."""

    def __init__(
        self,
        function: Callable[..., object],
        keywords: Any,
        output: IO[str] | None,
        heard: Callable[[int, str], bool] | None,
    ) -> None:
        self._pid = os.getpid()
        self._job = LaunchedJob(function, keywords, output)
        if heard is not None:
            self._job.set_note_handler(heard)
        self._listening = socket.socket(socket.AF_UNIX)
        self._connections: dict[int, socket.socket] = {}
        self._calls = 0
        self.ready = False
        """Whether all ranks wait for the next call."""
        try:
            self._listening.bind(self._job.path(CALL_SOCKET))
            self._listening.listen(4096)
        except BaseException:
            self.close()
            raise

    @property
    def started(self) -> bool:
        """Whether all ranks have connected."""
        return bool(self._connections)

    def prepare(self, function: Callable[..., object], args: tuple[object, ...]) -> None:
        """Write the next call to a file. LaunchError names what cannot be pickled; no rank knows of the call then."""
        __tracebackhide__ = True
        parcel.dump_call(function, args, self._job.path(f"call.{self._calls}"))

    def run_call(self, timeout_s: float | None, request: bytes) -> list[Any]:
        """Do the call that has been prepared; ``request`` is one of ``format_ranks.CALL`` and the like."""
        __tracebackhide__ = True
        number = self._calls
        self._job.capture_context()
        if not self._connections:
            self._job.start()
            self._accept_ranks()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._calls += 1
        self.ready = False
        for line in self._connections.values():
            try:
                line.sendall(request)
            except OSError:  # its end is noticed below
                pass
        raised_timeout_s = _QUIET_TIMEOUT_S if request == CALL_QUIETLY else RAISED_TIMEOUT_S
        raised, waiting = self._wait_for_done(deadline, raised_timeout_s)
        if waiting and request != CALL_QUIETLY:
            why = self._job.describe_waits()
            late = f"{format_ranks(waiting)} did not return within {raised_timeout_s:g} s after rank {raised[0]} had raised"
            self.print(f"{late}: {why}" if why else late)
        if waiting:
            raise self._job.raised(number, raised, len(waiting))
        self._job.flush()
        if raised:
            error = self._job.raised(number, raised, 0)
            self._job.discard(number)
            self.ready = True
            raise error
        results = self._job.results(number)
        self.ready = True
        return results

    def print(self, text: str) -> None:
        """Print a line of ddplaunch's own where the ranks' output goes."""
        self._job.print(f"ddplaunch: {text}\n")

    def _accept_ranks(self) -> None:
        """Wait until all ranks have connected; the first one's message has the world size."""
        __tracebackhide__ = True
        size = 1
        while len(self._connections) < size:
            self._wait([self._listening], None)
            line, _ = self._listening.accept()
            rank, size = (int.from_bytes(line.recv(4, socket.MSG_WAITALL), "big") for _ in range(2))
            self._connections[rank] = line

    def _wait(self, lines: Collection[socket.socket], deadline: float | None) -> list[socket.socket]:
        """Wait until one of these can be read: none where the time is over. Raises where the job has ended."""
        __tracebackhide__ = True
        with selectors.DefaultSelector() as selector:
            for each in (*lines, self._job.bell):
                selector.register(each, selectors.EVENT_READ)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = [key.fileobj for key, _ in selector.select(left)]
        if self._job.bell in ready:
            self._raise_end()
        return [each for each in lines if each in ready]

    def _wait_for_done(self, deadline: float | None, raised_timeout_s: float) -> tuple[list[int], list[int]]:
        """Wait until all ranks have done their call; return those that raised, and those that still run after that.

        Raises LaunchError at the deadline.
        """
        __tracebackhide__ = True
        waiting = {line: rank for rank, line in self._connections.items()}
        raised: list[int] = []
        until = deadline
        while waiting:
            ready = self._wait(waiting, until)
            if not ready and raised:
                return raised, sorted(waiting.values())
            if not ready:
                why = self._job.describe_waits()
                raise LaunchError("the call took too long" + (f": {why}" if why else ""))
            for line in ready:
                reply = _receive(line)
                if not reply:  # the launcher knows why
                    self._raise_end()
                rank = waiting.pop(line)
                if reply == RAISED:
                    raised.append(rank)
                    later = time.monotonic() + raised_timeout_s
                    until = until if len(raised) > 1 else later if deadline is None else min(deadline, later)
        return raised, []

    def _raise_end(self) -> NoReturn:
        """Raise why the job has ended."""
        __tracebackhide__ = True
        self._job.raise_end(max(0, self._calls - 1))
        raise LaunchError("the ranks have ended")

    def stop(self) -> None:
        """End them in the middle of a call, where they still run."""
        self._job.stop(signal.SIGINT)

    def close(self) -> None:
        if os.getpid() != self._pid:  # a fork of the caller ends; the ranks are not its own
            return
        for line in (*self._connections.values(), self._listening):
            line.close()
        if self._job.has_started and not self._job.wait(5.0):
            self._job.stop()
        self._job.remove_dir()


def _receive(line: socket.socket) -> bytes:
    try:
        return line.recv(1)
    except OSError:
        return b""
