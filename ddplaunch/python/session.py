"""``Session``: ranks that stay, and are called again and again."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
import weakref
from collections.abc import Callable, Collection
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar

from ddplaunch.errors import LaunchError, UsageError
from ddplaunch.python import parcel
from ddplaunch.python.job import LaunchedJob
from ddplaunch.python.ranks import AGAIN, CALLS

if TYPE_CHECKING:
    from typing_extensions import Self, TypeVarTuple, Unpack

    from ddplaunch.python.keywords import Keywords

    Args = TypeVarTuple("Args")

T = TypeVar("T")


class Session:
    """Ranks that keep their process group and state between calls, on this machine.

        with Session(nproc=4) as session:
            session.run(setup)
            for lr in (0.1, 0.01):
                print(session.run(train, lr))

    A call that fails ends the ranks; ``restart=True`` starts new ones for the next call.
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
        self.heard: Callable[[int, str], bool] | None = None  # see LaunchedJob.listen
        self._ranks: _Ranks | None = None
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args], timeout: float | None = None) -> list[T]:
        """Call a function in every rank, and return what each returned, in order of ranks.

        Args:
            timeout: seconds; ranks that take longer are stopped.

        Raises:
            RankFailed: a rank failed; what it raised is the ``__cause__``.
            LaunchError: the ranks did not start, were stopped, or took too long, or the session has ended.
        """
        if self._ended:
            raise LaunchError(
                "the session has ended: make a new one", "Session(restart=True) starts new ranks after a failure"
            )
        if self._ranks is None:
            self._ranks = _Ranks(function, self._keywords, self._output, self.heard)
            weakref.finalize(self, self._ranks.close)  # at the end of the interpreter, at the latest
        self._ranks.prepare(function, args)
        try:
            return self._ranks.call(timeout)
        except BaseException:
            self._ranks.stop()
            self.close()
            self._ended = not self._restart
            raise

    def close(self) -> None:
        """End the ranks, and wait until nothing is left of them."""
        ranks, self._ranks = self._ranks, None
        self._ended = True
        if ranks is not None:
            ranks.close()


class _Ranks:
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
            self._job.listen(heard)
        self._listening = socket.socket(socket.AF_UNIX)
        self._lines: dict[int, socket.socket] = {}
        self._calls = 0
        try:
            self._listening.bind(self._job.path(CALLS))
            self._listening.listen(4096)
            self._job.start()
        except BaseException:
            self.close()
            raise

    def prepare(self, function: Callable[..., object], args: tuple[object, ...]) -> None:
        """Write the next call down. Whatever is raised because it cannot be pickled: no rank has heard of it."""
        parcel.dump((function, args), self._job.path(f"call.{self._calls}"))

    def call(self, seconds: float | None) -> list[Any]:
        """Do the call that has been prepared."""
        number = self._calls
        deadline = None if seconds is None else time.monotonic() + seconds
        self._job.heed()
        if not self._lines:
            self._meet(deadline)
        self._calls += 1
        for line in self._lines.values():
            try:
                line.sendall(AGAIN)
            except OSError:  # its end is told below
                pass
        self._await(set(self._lines.values()), deadline)
        self._job.flush()
        return self._job.results(number)

    def _meet(self, deadline: float | None) -> None:
        """Wait until all ranks have connected; the first says how many there are."""
        size = 1
        while len(self._lines) < size:
            self._wait([self._listening], deadline)
            line, _ = self._listening.accept()
            rank, size = (int.from_bytes(line.recv(4, socket.MSG_WAITALL), "big") for _ in range(2))
            self._lines[rank] = line

    def _wait(self, lines: Collection[socket.socket], deadline: float | None) -> list[socket.socket]:
        """Wait until one of these can be read; raise where the job has ended, or the time is over."""
        with selectors.DefaultSelector() as selector:
            for each in (*lines, self._job.bell):
                selector.register(each, selectors.EVENT_READ)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = [key.fileobj for key, _ in selector.select(left)]
        if not ready:
            self._fail("the call took too long")
        if self._job.bell in ready:
            self._fail(None)
        return [each for each in lines if each in ready]

    def _await(self, waiting: set[socket.socket], deadline: float | None) -> None:
        """Wait until all these ranks have done their call."""
        while waiting:
            for line in self._wait(waiting, deadline):
                if not _has_said(line):  # the launcher says why
                    self._fail(None)
                waiting.discard(line)

    def _fail(self, why: str | None) -> NoReturn:
        """Raise why the ranks have ended; or end them, and say why and what they were doing."""
        if why is not None:
            found = self._job.explain()
            self._job.stop()
            raise LaunchError(f"{why}: {found}" if found else why)
        self._job.raise_end(max(0, self._calls - 1))
        raise LaunchError("the ranks have ended")

    def stop(self) -> None:
        """End them in the middle of a call, where they still run."""
        self._job.stop(signal.SIGINT)

    def close(self) -> None:
        if os.getpid() != self._pid:  # a fork of the caller ends; the ranks are not its own
            return
        for line in (*self._lines.values(), self._listening):
            line.close()
        if self._job.started and not self._job.wait(5.0):
            self._job.stop()
        self._job.clean()


def _has_said(line: socket.socket) -> bool:
    try:
        return bool(line.recv(1))
    except OSError:
        return False
