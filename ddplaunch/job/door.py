"""The door of a running job: a Unix socket on which a client of the same user asks it something.

It waits in the launcher's own loop, and costs nothing until a client asks. A connection is for one request and its
answers; how many there are, how long each lasts and what it may hold are bounded, so that no client disturbs the job.
What may be asked is in ``requests``.
"""

from __future__ import annotations

import os
import socket
import time
from functools import partial

from ddplaunch import TYPE_CHECKING
from ddplaunch.job.folder import listen_in_dir, remove_socket
from ddplaunch.loop import EventLoop, Timer
from ddplaunch.output.isolation import IsolatedLoop
from ddplaunch.wire.sockets import peer_uid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Protocol, TypeVar

    from ddplaunch.agent.debugging import DebugServer
    from ddplaunch.control.messages import ProfileReply
    from ddplaunch.diagnosis.inspection import Detail, Inspection
    from ddplaunch.job.requests import Request
    from ddplaunch.job.status import Status
    from ddplaunch.wire.connection import Connection

    M = TypeVar("M")
else:
    Protocol = object

MAX_CLIENTS = 16  # connections at a time; further ones wait in the kernel
CONNECTION_TIMEOUT_S = 5.0  # seconds from a connection to its end
MAX_REQUEST_BYTES = 4 << 10  # bytes of a request
MAX_REPLY_BYTES = 64 << 20  # bytes of an answer: the status of 16,000 ranks fits, and the stacks of 1,000
MAX_STREAMING_CLIENTS = 8  # of these that last as long as the job does
DRAIN_TIMEOUT_S = 0.5  # seconds in which followers may read the end of what the ranks printed
ACCEPT_PAUSE_S = 0.5  # seconds without accepting where the system has no descriptor left


class ServedJob(Protocol):
    """What a door serves."""

    def status(self) -> Status:
        """How this node's share stands."""

    def inspect_job(self, detail: Detail, on_done: Callable[[Inspection], None]) -> None:
        """Find out what all ranks of the job are doing; ``on_done`` is called with it, some seconds later at most."""

    def profile_job(self, seconds: float, torch: bool, hear: Callable[[ProfileReply], None]) -> None:
        """Find out where all ranks of the job spend their time; ``hear`` gets the profile of each, and the end."""

    def stop(self, now: bool, command: str = "") -> None:
        """End the job, as Ctrl-C does; ``now`` as a second one does. ``command``: which requests it."""

    def ranks_with_output(self) -> list[int]:
        """The ranks of this node whose output is in memory."""

    def output_tail(self, rank: int, since: float | None = None) -> bytes:
        """The last that such a rank printed in its attempt, or since a moment in any attempt."""

    def debug_server(self) -> DebugServer | None:
        """Its ranks that are in a debugger; None where ranks never wait for one."""

    def flush_output(self, mark: bytes) -> None:
        """Show all that ranks have printed by now, and then ``mark`` on stdout and stderr."""

    def subscribe_output(self, on_output: Callable[[int, bytes], None]) -> None:
        """From now on call ``hear`` with each piece that a rank prints."""

    def unsubscribe_output(self, hear: Callable[[int, bytes], None]) -> None:
        """No longer."""


class RequestContext:
    """A client that has asked something."""

    def __init__(
        self, door: ControlSocket, connection: Connection[Request[object]], job: ServedJob, isolated: IsolatedLoop
    ) -> None:
        """``isolated`` calls what the request has the job call: an exception costs the client its answer."""
        self._door, self._connection, self.job = door, connection, job
        self.send, self.finish, self.guard = connection.send, connection.shutdown_write, isolated.guard

    @property
    def unsent_bytes(self) -> int:
        return self._connection.unsent_bytes

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._door.call_soon(self.guard(callback))

    def expect(self, kinds: Iterable[type[M]], on_message: Callable[[M], None], max_bytes: int) -> None:
        """From now on call ``on_message`` with what the client says, in frames of so many bytes at most."""
        connection: Connection[M] = self._connection  # type: ignore[assignment]
        connection.set_accepted_types(kinds, max_bytes)
        connection.on_message = self.guard(on_message)

    def on_job_end(self, leave: Callable[[int | None], None]) -> None:
        self._door.keep_open(self._connection, leave)


class ControlSocket:
    """Serves one job until it is closed."""

    def __init__(self, loop: EventLoop, run_id: str, job: ServedJob, report: Callable[[str], object]) -> None:
        """``run_id`` is a part of the socket's name, for people; ``report`` gets a message of a request that raises."""
        self._loop, self._report = loop, report
        self._job = job
        self._clients: dict[Connection[Request[object]], Timer] = {}
        self._on_job_end: dict[Connection[Request[object]], Callable[[int | None], None]] = {}  # of those who stay
        self._socket: socket.socket | None
        self.path: str | None  # both None where there is no folder for it: the job runs without a door
        self._socket, self.path = listen_in_dir(run_id)
        self._resume_accepting()

    def close(self, code: int | None = None) -> None:
        """Remove it; a client that is being answered has what the kernel took of that, one that stays a moment more.

        ``code`` is the job's exit code, None where it has none.
        """
        if self._socket is None or self.path is None:
            return
        remove_socket(self.path)
        self._loop.unwatch_fd(self._socket.fileno())
        self._socket.close()
        self._socket = None
        leaving, self._on_job_end = self._on_job_end, {}  # each leaves once
        for client, leave in leaving.items():
            leave(code)
            client.shutdown_write()
        over = time.monotonic() + DRAIN_TIMEOUT_S
        self._loop.call_later(DRAIN_TIMEOUT_S, lambda: None)
        while any(client.unsent_bytes for client in leaving if client in self._clients) and time.monotonic() < over:
            self._loop.run_once()
        for client in list(self._clients):
            self._close_client(client)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call it in the next step of the loop, if the door is still open then."""
        self._loop.call_soon(lambda: callback() if self._socket is not None else None)

    def keep_open(self, client: Connection[Request[object]], leave: Callable[[int | None], None]) -> None:
        """Keep a client until the job has ended, or it goes; then call ``leave``."""
        self._on_job_end[client] = IsolatedLoop(self._loop, "the end of a request", self._report).guard(leave)
        self._clients[client].cancel()

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            sock, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left, or the client has gone already
            self._loop.unwatch_fd(self._socket.fileno())
            self._loop.call_later(ACCEPT_PAUSE_S, self._resume_accepting)
            return
        if peer_uid(sock) != os.geteuid():
            sock.close()
            return
        from ddplaunch.job.requests import all_requests
        from ddplaunch.wire.connection import Connection

        client: Connection[Request[object]] = Connection(
            self._loop,
            sock,
            all_requests(),
            on_message=lambda request: self._handle_request(client, request),
            on_lost=lambda why: self._close_client(client),
            max_bytes=MAX_REQUEST_BYTES,
            max_send_buffer=MAX_REPLY_BYTES,
        )
        self._clients[client] = self._loop.call_later(CONNECTION_TIMEOUT_S, partial(self._close_client, client))
        if len(self._clients) == MAX_CLIENTS:
            self._loop.unwatch_fd(self._socket.fileno())

    def _resume_accepting(self) -> None:
        if self._socket is not None and len(self._clients) < MAX_CLIENTS:
            self._loop.watch_fd(self._socket.fileno(), self._accept)

    def _handle_request(self, client: Connection[Request[object]], request: Request[object]) -> None:
        client.set_accepted_types(())
        if request.is_streaming and len(self._on_job_end) == MAX_STREAMING_CLIENTS:
            return client.shutdown_write()

        def drop() -> None:
            if client in self._clients:
                self._close_client(client)

        isolated = IsolatedLoop(self._loop, f"the answer to {type(request).__name__}", self._report, drop)
        isolated.guard(request.handle)(RequestContext(self, client, self._job, isolated))

    def _close_client(self, client: Connection[Request[object]]) -> None:
        self._clients.pop(client).cancel()
        if leave := self._on_job_end.pop(client, None):
            leave(None)
        client.close()
        self._resume_accepting()
