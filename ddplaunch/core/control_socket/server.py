"""The control socket of a running job: a Unix socket on which clients of the same user send requests.

It is served by the launcher's own event loop, and costs nothing while there is no client. A connection is for one
request and its replies; the number of clients, their time and their buffers are bounded, so that no client disturbs
the job. The requests are in ``requests``.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from ddplaunch.base.event_loop import EventLoop, Timer
from ddplaunch.base.local_sockets import peer_uid
from ddplaunch.core.control_socket.job_status import Status
from ddplaunch.core.control_socket.socket_dir import listen_in_dir, remove_socket
from ddplaunch.core.messages import ProfileReply
from ddplaunch.core.net.connection import Connection
from ddplaunch.core.output.isolation import IsolatedLoop

if TYPE_CHECKING:
    from ddplaunch.core.control_socket.request import Request
    from ddplaunch.features.debug.debug_server import DebugServer
    from ddplaunch.features.inspect.diagnosis.inspection import Detail, Inspection


M = TypeVar("M")

MAX_CLIENTS = 16  # connections at a time; further ones wait in the kernel
CONNECTION_TIMEOUT_S = 5.0  # from accept to close, but for streaming requests
MAX_REQUEST_BYTES = 4 << 10
MAX_REPLY_BYTES = 64 << 20  # the status of 16,000 ranks fits, and the stacks of 1,000
MAX_STREAMING_CLIENTS = 8  # at a time; their requests last until the job ends
DRAIN_TIMEOUT_S = 0.5  # at the end of the job, for streaming clients to read the last output
ACCEPT_PAUSE_S = 0.5  # without accepting, after the system ran out of descriptors


class ServedJob(Protocol):
    """What requests on the control socket, and features, can read and do: this node's launcher."""

    def status(self) -> Status:
        """Return the status of this node's part of the job."""

    def inspect_job(self, detail: Detail, on_done: Callable[[Inspection], None]) -> None:
        """Inspect all ranks of the job; ``on_done`` is called with the result, some seconds later at most."""

    def inspect_node(self, detail: str, on_done: Callable[[Inspection], None]) -> None:
        """Inspect the ranks of this node alone."""

    def profile_job(self, seconds: float, torch: bool, on_reply: Callable[[ProfileReply], None]) -> None:
        """Profile all ranks of the job; ``on_reply`` is called with the profile of each rank, and with the end."""

    def stop(self, now: bool, command: str = "") -> None:
        """Stop the job, as Ctrl-C does; ``now``: as a second Ctrl-C does. ``command``: the command that requests it."""

    def ranks_with_output(self) -> list[int]:
        """List the ranks of this node whose output is in memory."""

    def output_tail(self, rank: int, since: float | None = None) -> bytes:
        """Return the last output of such a rank: of its attempt, or of all attempts since a moment."""

    def output_times(self, rank: int, count: int) -> bytes:
        """Return the file with the times of the last ``count`` bytes of a rank's output."""

    def on_sample(self) -> None:
        """Called when the usage of the ranks was sampled."""

    def debug_server(self) -> DebugServer | None:
        """Return the debug server of this node; None in a job without debugger."""

    def flush_output(self, mark: bytes) -> None:
        """Show all output that ranks have printed by now, then write ``mark`` to stdout and stderr."""

    def subscribe_output(self, on_output: Callable[[int, bytes], None]) -> None:
        """Call ``on_output`` with each chunk that a rank prints from now on."""

    def unsubscribe_output(self, on_output: Callable[[int, bytes], None]) -> None:
        """End a subscription of ``subscribe_output``."""


class RequestContext:
    """One client request being handled; passed to ``Request.handle``."""

    def __init__(
        self, server: ControlSocket, connection: Connection[Request[object]], job: ServedJob, isolated: IsolatedLoop
    ) -> None:
        """``isolated`` runs the request's callbacks: an exception in one costs the client its reply, nothing more."""
        self._server, self._connection, self.job = server, connection, job
        self.send, self.finish, self.guard = connection.send, connection.shutdown_write, isolated.guard

    @property
    def unsent_bytes(self) -> int:
        return self._connection.unsent_bytes

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._server.call_soon(self.guard(callback))

    def expect(self, kinds: Iterable[type[M]], on_message: Callable[[M], None], max_bytes: int) -> None:
        """Call ``on_message`` with each further message of the client, in frames of at most ``max_bytes``."""
        connection: Connection[M] = self._connection  # type: ignore[assignment]
        connection.set_accepted_types(kinds, max_bytes)
        connection.on_message = self.guard(on_message)

    def on_job_end(self, on_end: Callable[[int | None], None]) -> None:
        """Keep the connection open; call ``on_end`` at the end of the job, or without a code when the client leaves."""
        self._server.keep_open(self._connection, on_end)


class ControlSocket:
    """The server of the control socket of one job, from the launcher's start until ``close``."""

    def __init__(self, loop: EventLoop, run_id: str, job: ServedJob, report: Callable[[str], object]) -> None:
        """``run_id`` is a part of the socket's name; ``report`` is called with a message when a request raises."""
        self._loop, self._report = loop, report
        self._job = job
        self._clients: dict[Connection[Request[object]], Timer] = {}
        self._on_job_end: dict[Connection[Request[object]], Callable[[int | None], None]] = {}  # of streaming clients
        self._socket: socket.socket | None
        self.path: str | None  # both None where there is no folder for it: the job runs without a control socket
        self._socket, self.path = listen_in_dir(run_id)
        self._resume_accepting()

    def close(self, code: int | None = None) -> None:
        """Remove the socket and close all connections, those of streaming clients once they have read the last output.

        What the kernel has of other replies is still delivered. ``code`` is the job's exit code, None without one.
        """
        if self._socket is None or self.path is None:
            return
        remove_socket(self.path)
        self._loop.unwatch_fd(self._socket.fileno())
        self._socket.close()
        self._socket = None
        streaming, self._on_job_end = self._on_job_end, {}  # each callback is called once
        for client, on_end in streaming.items():
            on_end(code)
            client.shutdown_write()
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        self._loop.call_later(DRAIN_TIMEOUT_S, lambda: None)
        while any(each.unsent_bytes for each in streaming if each in self._clients) and time.monotonic() < deadline:
            self._loop.run_once()
        for client in list(self._clients):
            self._close_client(client)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call it in the next step of the event loop, if the control socket is still open then."""
        self._loop.call_soon(lambda: callback() if self._socket is not None else None)

    def keep_open(self, client: Connection[Request[object]], on_end: Callable[[int | None], None]) -> None:
        """Keep a client's connection until the job ends or the client disconnects; then call ``on_end``."""
        self._on_job_end[client] = IsolatedLoop(self._loop, "the end of a request", self._report).guard(on_end)
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
        from ddplaunch.core.control_socket.request import all_requests

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
        if on_end := self._on_job_end.pop(client, None):
            on_end(None)
        client.close()
        self._resume_accepting()
