"""The supervisor's end of the zygote: starts it, asks it for ranks, hears how they end."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from ddplaunch import TYPE_CHECKING
from ddplaunch.agent import limits
from ddplaunch.agent.mailbox import ZygoteSocket
from ddplaunch.agent.zygote_process import OwnZygote, ZygoteProcess
from ddplaunch.inherited import AT_START
from ddplaunch.loop import EventLoop
from ddplaunch.preload.choice import PreloadPlan

if TYPE_CHECKING:
    from typing import Protocol

    from ddplaunch.agent.warm_runs import WarmZygoteStarter
    from ddplaunch.rank.messages import FromZygote, RankJob, Usage, ZygoteConfig
else:
    Protocol = object

OWN_EXIT_TIMEOUT_S = 0.5  # seconds in which what a program left behind may end by itself before it is told to
LEFTOVER_GRACE_S = 5.0  # seconds at most that processes left behind by ranks that succeeded have for their own end
MAX_IN_FLIGHT = 8  # ranks that are asked for and not born yet: each has up to six descriptors on their way
_MAX_TITLE_BYTES = (
    4096  # bytes of the ranks' command line for ``ps``; the kernel refuses a word of 128 KiB (MAX_ARG_STRLEN)
)

BuildRankJob = Callable[[dict[str, int]], "RankJob"]
"""Describes a rank, and puts in its descriptors, by purpose: stdin, stdout, stderr, answers."""


class ZygoteListener(Protocol):
    """Hears what a zygote says; it is never called back from within a call to its client."""

    def on_zygote_ready(self, forks: bool, failed: str | None, unsafe: str | None, seconds: float) -> None:
        """It can start ranks; ``failed`` says why it has imported its fallback, the rest is as in ``events.Ready``."""

    def on_import_failed(self, message: str) -> None: ...  # what was to be imported cannot be
    def on_spawned(self, rank: int, pid: int, pidfd: int | None) -> None: ...
    def on_spawn_failed(self, rank: int, errno: int) -> None: ...  # it can be given no process, or no descriptors
    def on_exited(self, rank: int, pid: int, code: int, usage: Usage) -> None: ...  # -N for signal N
    def store_exited(self, pid: int, code: int) -> None: ...  # the process of the store; never by our doing
    def on_swept(self, found: list[str], stuck: list[str]) -> None: ...  # nothing is left; as in ``events.Swept``
    def on_zygote_signalled(
        self, number: int, rank: int | None
    ) -> None: ...  # a signal has come to it: from a rank, or to all
    def on_zygote_lost(self) -> None: ...  # it has ended unasked


class ZygoteClient:
    """One zygote process, from construction to ``close``; ranks are asked for a few at a time, once it is ready."""

    def __init__(
        self,
        loop: EventLoop,
        *,
        listener: ZygoteListener,
        environment: Mapping[str, str],
        preload: PreloadPlan | None = None,  # what to import before forking; None, and every rank is a new interpreter
        first: str = "",  # the folder that ranks have in front of ``sys.path``
        remove: Sequence[str] = (),  # paths that it removes should we be killed
        title: str = "",  # the longest command line that ``ps`` is to show for a rank
        shielded: Sequence[int] = (),  # signals for us alone that everything below gets; a rank may yet handle them
        blocked: Iterable[int] = (),  # signals that a rank inherits as blocked
        warm: WarmZygoteStarter | None = None,  # may have one that has imported all already
    ) -> None:
        """Start the zygote.

        Raises:
            CannotStart: a limit on processes or memory.
        """
        self._loop, self._listener = loop, listener
        preload = preload or PreloadPlan()
        self.ready = self.killed = self.stores = False  # ``stores``: whether the job's store can be in a fork of it
        config: ZygoteConfig = {
            "supervisor": os.getpid(),
            "forks": preload.forks,
            "modules": list(preload.modules),
            "asked": list(preload.user_modules),
            "fallback": list(preload.fallback),
            "allowed": preload.allowed,
            "reads": list(preload.environment_reads),
            "settings": dict(preload.settings),
            "first": first,
            "folders": list(preload.import_dirs),
            "remove": list(remove),
            "shielded": list(shielded),
            "blocked": sorted(blocked),
            "ignores_children": AT_START.ignores_children,
            "failed": None,
            "unsafe": preload.unsafe,
            "warm": None,
            "guarded": False,
        }
        found = warm.get_zygote(config, environment) if warm else None
        self._process: ZygoteProcess
        if found:
            self._process, ours = found
        else:
            ours, theirs = socket.socketpair()
            room = min(len(title.encode(errors="replace")), _MAX_TITLE_BYTES)
            try:
                self._process = OwnZygote(config, theirs, environment, room)
            except OSError as error:
                ours.close()
                raise limits.ResourceLimitError(
                    f"no process can be started: {limits.describe_spawn_error(error.errno)}"
                ) from None
            finally:
                theirs.close()
        self._mailbox = ZygoteSocket(loop, ours, self._on_message, listener.on_zygote_lost)
        self._queue: deque[tuple[int, BuildRankJob]] = deque()
        self._in_flight = 0

    def spawn(self, ranks: Iterable[tuple[int, BuildRankJob]]) -> None:
        """Ask for each rank when its turn has come; answered by ``on_spawned`` or ``on_spawn_failed``."""
        self._queue.extend(ranks)
        self._request_next()

    def serve_store(self, listening: int) -> None:
        """Have a new store, and no other, on this socket, which becomes the zygote's; before any rank is asked for."""
        self._mailbox.send({"op": "store"}, [listening], lambda error: self._mailbox.send({"op": "store"}))

    def cancel_pending(self) -> int:
        """Ask for no more ranks; return how many of those wanted are not on their way, and never will be."""
        back = min(
            self._mailbox.withdraw_unsent(), self._in_flight
        )  # the store's socket may be the one that has not left
        self._in_flight -= back
        count = back + len(self._queue)
        self._queue.clear()
        return count

    def remove_on_exit(self, path: str) -> None:
        """Have ``path`` removed, too, should we be killed."""
        self._mailbox.send({"op": "remove", "path": path})

    def sweep(self, grace: float, *, own_exit_timeout_s: float = OWN_EXIT_TIMEOUT_S) -> None:
        """Have all below ended: SIGTERM after ``own_exit_timeout_s``, SIGKILL ``grace`` seconds later; answered by ``on_swept``."""
        self._mailbox.send({"op": "sweep", "grace": grace, "patience": own_exit_timeout_s})

    def kill(self) -> None:
        """End the zygote at once, and with it, by their parent-death signal, its ranks."""
        self.killed = True
        self._process.kill()

    def close(self) -> int | None:
        """Let the zygote end whatever it still has and leave; return its wait status, None if it was closed before."""
        if self._mailbox.is_closed:
            return None
        if not self.ready:
            self.kill()  # it has nothing to end yet, and may import for long
        self._queue.clear()
        self._mailbox.close()
        return self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def unkillable(self) -> list[str]:
        """What of it cannot be killed, where that is not ours to try: once it is closed."""
        return list(self._process.unkillable)

    def _request_next(self) -> None:
        while self.ready and self._queue and self._in_flight < MAX_IN_FLIGHT and self._mailbox.is_idle:
            rank, prepare = self._queue.popleft()
            self._in_flight += 1
            fds: dict[str, int] = {}
            try:
                job = prepare(fds)
            except OSError as error:  # the next would fare no better
                for fd in fds.values():
                    os.close(fd)
                return self._on_spawn_failed(rank, error)
            failed = partial(self._on_spawn_failed, rank)
            self._mailbox.send({"op": "spawn", "rank": rank, "job": job, "fds": list(fds)}, list(fds.values()), failed)

    def _on_spawn_failed(self, rank: int, error: OSError) -> None:
        self._loop.call_soon(partial(self._on_message, {"op": "unborn", "rank": rank, "errno": error.errno or 0}, []))

    def _on_message(self, message: FromZygote, fds: list[int]) -> None:
        if message["op"] == "ready":
            self.ready, self.stores = True, message["stores"]
            self._process.on_ready(message["pid"], fds[0] if fds else None)
            self._listener.on_zygote_ready(message["forks"], message["failed"], message["unsafe"], message["seconds"])
        elif message["op"] == "refused":
            self._listener.on_import_failed(message["message"])
        elif message["op"] == "spawned":
            self._in_flight -= 1
            self._listener.on_spawned(message["rank"], message["pid"], fds[0] if fds else None)
        elif message["op"] == "unborn":
            self._in_flight -= 1
            self._listener.on_spawn_failed(message["rank"], message["errno"])
        elif message["op"] == "exited":
            code = os.waitstatus_to_exitcode(message["status"])
            self._listener.on_exited(message["rank"], message["pid"], code, message["usage"])
        elif message["op"] == "store exited":
            self._listener.store_exited(message["pid"], os.waitstatus_to_exitcode(message["status"]))
        elif message["op"] == "signalled":
            self._listener.on_zygote_signalled(message["number"], message["rank"])
        elif message["op"] == "swept":
            self._listener.on_swept(message["found"], message["stuck"])
        if not self._mailbox.is_closed:
            self._request_next()
