"""How a feature runs commands on other hosts, for those that need one: the doctor, the debugger."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # a command about a run does not need the cluster systems that this imports
    from ddplaunch.system.clusters.host_spec import Host


class NodeCommand(NamedTuple):
    """A command that runs Python code on a node, with its stdin and stdout."""

    host: str
    address: str  # of the host, for the other nodes; "" in a job of one node
    words: Sequence[str]
    test_command: str = ""  # with which a user can test the connection


class HostConnector(ABC):
    """A feature's way to run commands on other hosts."""

    @abstractmethod
    def interactive_command(self, host: str, words: list[str], *, terminal: bool) -> list[str]:
        """Return the command that runs a ddplaunch command on a host, on this terminal or with pipes."""

    @abstractmethod
    def python_commands(
        self, hosts: Sequence[Host], python: str, statement: str, timeout_s: float
    ) -> list[NodeCommand]:
        """Return the command that runs a Python statement, for each host.

        ``timeout_s``: without data for this long a host counts as lost. Raises UsageError if a host cannot be used.
        """
