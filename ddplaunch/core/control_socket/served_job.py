"""The job that requests on the control socket are about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from ddplaunch.core.control_socket.job_status import Status
from ddplaunch.core.events import Event
from ddplaunch.core.messages import FromNode
from ddplaunch.core.node.node_rpc import NodeRpc

T = TypeVar("T")


class ServedJob(Protocol):
    """What requests on the control socket, and features, can read and do: this node's launcher."""

    @property
    def rpc(self) -> NodeRpc:
        """Sends requests to all nodes."""

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

    def ranks_with_output(self) -> list[int]:
        """List the ranks of this node whose output is in memory."""

    def output_tail(self, rank: int, since: float | None = None) -> bytes:
        """Return the last output of such a rank: of its attempt, or of all attempts since a moment."""

    def output_times(self, rank: int, count: int) -> bytes:
        """Return the file with the times of the last ``count`` bytes of a rank's output."""

    def find_side(self, kind: type[T]) -> T | None:
        """Return the node side of a feature; None if the job has none."""

    def flush_output(self, mark: bytes) -> None:
        """Show all output that ranks have printed by now, then write ``mark`` to stdout and stderr."""

    def subscribe_output(self, on_output: Callable[[int, bytes], None]) -> None:
        """Call ``on_output`` with each chunk that a rank prints from now on."""

    def unsubscribe_output(self, on_output: Callable[[int, bytes], None]) -> None:
        """End a subscription of ``subscribe_output``."""
