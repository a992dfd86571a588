"""The control socket of a running job: a Unix socket on which clients of the same user send requests.

It is served by the launcher's own event loop, and costs nothing while there is no client. A connection is for one
request and its replies; the number of clients, their time and their buffers are bounded, so that no client disturbs
the job. The requests are subclasses of ``Request``.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module

from ddplaunch.base.connection import Connection
from ddplaunch.base.event_loop import EventLoop, Timer
from ddplaunch.base.local_sockets import peer_uid
from ddplaunch.core.control_socket.request import Request, RequestContext, ServedJob
from ddplaunch.core.control_socket.socket_dir import open_control_socket, remove_socket
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.isolation import Isolation

MAX_CLIENTS = 16  # connections at a time; further ones wait in the kernel
CONNECTION_TIMEOUT_S = 5.0  # from accept to close, but for streaming requests
MAX_REQUEST_BYTES = 4 << 10
MAX_REPLY_BYTES = 64 << 20  # the status of 16,000 ranks fits, and the stacks of 1,000
MAX_STREAMING_CLIENTS = 8  # at a time; their requests last until the job ends
DRAIN_TIMEOUT_S = 0.5  # at the end of the job, for streaming clients to read the last output
ACCEPT_PAUSE_S = 0.5  # without accepting, after the system ran out of descriptors


@cache
def list_request_types() -> tuple[type[Request[object]], ...]:
    """Import the modules of core and of the features that define requests, and return all request types."""
    import_module(f"{__package__}.status_request")
    list(load_features().modules("requests"))  # the import of a module defines its requests
    return tuple(Request.__subclasses__())


class ControlSocket:
    """The server of the control socket of one job, from the launcher's start until ``close``."""

    def __init__(self, loop: EventLoop, run_id: str, job: ServedJob) -> None:
        """``run_id`` is a part of the socket's name."""
        self._loop, self._job = loop, job
        self._clients: dict[Connection[Request[object]], Timer] = {}
        self._on_job_end: dict[Connection[Request[object]], Callable[[int | None], None]] = {}  # of streaming clients
        self._imports = Isolation("the control socket", lambda text: job.report_bug(text))  # the package may be gone
        self._socket: socket.socket | None
        self.path: str | None  # both None where there is no folder for it: the job runs without a control socket
        self._socket, self.path = open_control_socket(run_id)
        self._resume_accepting()

    def close(self, code: int | None = None) -> None:
        """Remove the socket and close all connections, those of streaming clients once they have read the last output.

        Other replies that the kernel has already are still delivered. ``code`` is the job's exit code, if known.
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

    def _keep_open(self, client: Connection[Request[object]], on_end: Callable[[int | None], None]) -> None:
        """Keep a client's connection until the job ends or the client disconnects; then call ``on_end``."""
        self._on_job_end[client] = Isolation("the end of a request", self._job.report_bug).guard(on_end)
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
        if peer_uid(sock) != os.geteuid() or not (requests := self._imports.call(list_request_types)):
            sock.close()
            return
        client: Connection[Request[object]] = Connection(
            self._loop,
            sock,
            requests,
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

        def drop_client() -> None:
            if client in self._clients:
                self._close_client(client)

        isolated = Isolation(f"the answer to {type(request).__name__}", self._job.report_bug)
        isolated.on_error = drop_client
        isolated.call(request.handle, RequestContext(client, self._job, isolated, partial(self._keep_open, client)))

    def _close_client(self, client: Connection[Request[object]]) -> None:
        self._clients.pop(client).cancel()
        if on_end := self._on_job_end.pop(client, None):
            on_end(None)
        client.close()
        self._resume_accepting()
