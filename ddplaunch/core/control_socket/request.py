"""The base class of the requests that a running job answers on its control socket; each has its replies and handler.

All are plain data, checked as the nodes' messages are. Core's requests and those of the features are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Generic, Protocol, TypeVar

from ddplaunch.base.connection import Connection
from ddplaunch.base.types import TaggedMessage
from ddplaunch.core.control_socket.served_job import ServedJob
from ddplaunch.core.feature import load_features
from ddplaunch.core.output.isolation import IsolatedLoop

M = TypeVar("M")
A = TypeVar("A", covariant=True)  # the reply, or the last kind of them


class RequestServer(Protocol):
    """What a request uses of the control socket."""

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call it in the next step of the event loop, if the control socket is still open then."""

    def keep_open(self, client: Connection[Request[object]], on_end: Callable[[int | None], None]) -> None:
        """Keep a client's connection until the job ends or the client disconnects; then call ``on_end``."""


class RequestContext:
    """One client request being handled; passed to ``Request.handle``."""

    def __init__(
        self, connection: Connection[Request[object]], job: ServedJob, isolated: IsolatedLoop, server: RequestServer
    ) -> None:
        """``isolated`` runs the request's callbacks: an exception in one costs the client its reply, nothing more."""
        self._connection, self.job, self._server = connection, job, server
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


class Request(TaggedMessage, Generic[A], frozen=True):
    """Base class of requests. ``answers``: the types of its replies, in order; ``A`` is the last of them."""

    answers = tuple[type, ...]()  # without an annotation, so that it is not a field

    @property
    def is_streaming(self) -> bool:
        """Whether replies come until the job ends; MAX_STREAMING_CLIENTS of them at a time are accepted."""
        return False

    def handle(self, context: RequestContext) -> None:
        """Send the replies, now or later."""
        raise NotImplementedError


@cache
def all_requests() -> tuple[type[Request[object]], ...]:
    """Import the modules of core and of the features that define requests, and return all request types."""
    import_module(f"{__package__}.status_request")
    for _ in load_features().modules("requests"):
        pass
    return tuple(Request.__subclasses__())
