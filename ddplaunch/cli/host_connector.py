"""The interface with which features like the doctor and the debugger run commands on other hosts."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ddplaunch.base.errors import EXIT_UNAVAILABLE, LaunchError

if TYPE_CHECKING:  # a command about a run does not need the cluster systems that this imports
    import subprocess

    from ddplaunch.system.clusters.host_spec import Host


SSH_FAILED = 255
"""ssh's own exit code (ssh(1)): it cannot connect, or the connection was lost."""


def lost_host_error(message: str, hint: str) -> LaunchError:
    """Return the error of a command whose host cannot be reached."""
    error = LaunchError(message, hint)
    error.exit_code = EXIT_UNAVAILABLE
    return error


def make_waiter(command: subprocess.Popen[bytes], message: str, hint: str) -> Callable[[], int]:
    """Return a function that waits for a command on another host and returns its exit code.

    It raises LaunchError with this message and hint if ssh itself has failed.
    """

    def wait() -> int:
        try:
            code = command.wait()
        except BaseException:
            command.kill()
            raise
        if code == SSH_FAILED:
            raise lost_host_error(message, hint)
        return code

    return wait


class NodeCommand(NamedTuple):
    """A command that runs Python code on a node; its stdin and stdout are those of the code."""

    host: str
    address: str  # the address at which the other nodes reach the host; "" in a job of one node
    words: Sequence[str]
    test_command: str = ""  # with which a user can test the connection


class HostConnector(ABC):
    """Base class: builds the commands that run a program on another host; a feature implements it."""

    @abstractmethod
    def interactive_command(
        self, host: str, words: list[str], *, terminal: bool, environ: Mapping[str, str] = os.environ
    ) -> list[str]:
        """Return the command that runs a ddplaunch command on a host, on this terminal or with pipes.

        ``environ`` has the variables that Python may need to start on the host.
        """

    @abstractmethod
    def python_commands(
        self, hosts: Sequence[Host], python: str, statement: str, timeout_s: float
    ) -> list[NodeCommand]:
        """Return the command that runs a Python statement, for each host.

        ``timeout_s``: without data for this long a host counts as lost. Raises UsageError if a host cannot be used.
        """
