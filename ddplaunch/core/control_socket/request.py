"""The base class of requests on a job's control socket, and what their handlers may use of the job.

Each request names the types of its replies, and has its handler. Requests and replies are plain data, and are checked
like messages between nodes. The core and the features define requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ddplaunch.base.connection import Connection
from ddplaunch.base.types import TaggedMessage

if TYPE_CHECKING:
    from ddplaunch.core.agent.node_rpc import NodeRpc
    from ddplaunch.core.control_socket.job_status import Status
    from ddplaunch.core.events import Event
    from ddplaunch.core.isolation import Isolation
    from ddplaunch.core.messages import FromNode
    from ddplaunch.core.output.streams import Streams

KeepOpen = Callable[[Callable[[int | None], None]], None]

M = TypeVar("M")
T = TypeVar("T")
A = TypeVar("A", covariant=True)  # the type of the reply, or of the last reply


class ServedJob(Protocol):
    """This node's launcher, as handlers of control socket requests and features may use it."""

    @property
    def rpc(self) -> NodeRpc:
        """Sends requests to all nodes."""

    @property
    def streams(self) -> Streams:
        """The output of the ranks of this node."""

    @property
    def control_socket_path(self) -> str | None:
        """The path of the control socket; None if there is no folder for it."""

    def status(self) -> Status:
        """Return the status of this node's part of the job."""

    def emit(self, event: Event) -> None:
        """Emit an event to all observers."""

    def send(self, message: FromNode) -> None:
        """Send a control message to node 0."""

    def stop(self, now: bool, command: str = "") -> None:
        """Stop the job, as Ctrl-C does; ``now``: as a second Ctrl-C does. ``command``: the command that requests it."""

    def report_bug(self, text: str) -> None:
        """Show a note that the code of a request or of a feature has raised an exception."""

    def find_side(self, kind: type[T]) -> T | None:
        """Return the node side of a feature; None if the job has none."""


class RequestContext:
    """One client request being handled; passed to ``Request.handle``."""

    def __init__(
        self, connection: Connection[Request[object]], job: ServedJob, isolated: Isolation, keep_open: KeepOpen
    ) -> None:
        """``isolated`` runs the request's callbacks: after an exception in one, only this client gets no reply."""
        self._connection, self.job, self._keep_open = connection, job, keep_open
        self.send, self.finish, self.guard = connection.send, connection.shutdown_write, isolated.guard

    @property
    def unsent_bytes(self) -> int:
        return self._connection.unsent_bytes

    def expect(self, kinds: Iterable[type[M]], on_message: Callable[[M], None], max_bytes: int) -> None:
        """Call ``on_message`` with each further message of the client, in frames of at most ``max_bytes``."""
        connection: Connection[M] = self._connection  # type: ignore[assignment]
        connection.set_accepted_types(kinds, max_bytes)
        connection.on_message = self.guard(on_message)

    def on_job_end(self, on_end: Callable[[int | None], None]) -> None:
        """Keep the connection open; call ``on_end`` with the exit code at the job's end, None if the client leaves."""
        self._keep_open(on_end)


class Request(TaggedMessage, Generic[A], frozen=True):
    """Base class of requests. ``answers``: the types of its replies, in order; ``A`` is the last of them."""

    answers = tuple[type, ...]()  # without an annotation, so that it is not a field

    @property
    def is_streaming(self) -> bool:
        """Whether replies come until the job ends; MAX_STREAMING_CLIENTS of them at a time are accepted."""
        return False

    def handle(self, context: RequestContext) -> None:
        """Handle the request: send its replies, now or later."""
        raise NotImplementedError
