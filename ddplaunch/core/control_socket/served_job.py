"""The job that requests on the control socket are about."""

from __future__ import annotations

from typing import Protocol, TypeVar

from ddplaunch.core.control_socket.job_status import Status
from ddplaunch.core.events import Event
from ddplaunch.core.messages import FromNode
from ddplaunch.core.node.node_rpc import NodeRpc
from ddplaunch.core.output.streams import Streams

T = TypeVar("T")


class ServedJob(Protocol):
    """What requests on the control socket, and features, can read and do: this node's launcher."""

    @property
    def rpc(self) -> NodeRpc:
        """Sends requests to all nodes."""

    @property
    def streams(self) -> Streams:
        """The output of the ranks of this node."""

    def status(self) -> Status:
        """Return the status of this node's part of the job."""

    def emit(self, event: Event) -> None:
        """Emit an event to all observers."""

    def send(self, message: FromNode) -> None:
        """Send a control message to node 0."""

    def stop(self, now: bool, command: str = "") -> None:
        """Stop the job, as Ctrl-C does; ``now``: as a second Ctrl-C does. ``command``: the command that requests it."""

    def report_bug(self, text: str) -> None:
        """Show a note on a request or a feature that has raised."""

    def find_side(self, kind: type[T]) -> T | None:
        """Return the node side of a feature; None if the job has none."""
