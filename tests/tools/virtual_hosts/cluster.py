"""The base class of clusters on virtual hosts: ends their daemons, and waits for their jobs."""

import time
from collections.abc import Callable
from typing import TypeVar

from tests.scaled_timeouts import scaled_timeout
from tests.tools.virtual_hosts.network import Network

C = TypeVar("C", bound="Cluster")


class ClusterError(Exception):
    """A scheduler did not do what was requested."""


class Cluster:
    """A scheduler's daemons: n0 of the network is controller and login node, the others are compute nodes.

    A context manager; without ``with``, call ``close``.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.login, *self.nodes = network.hosts

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Switch off its hosts, which kills all daemons and jobs and removes their files; may be called again."""
        for host in self.network.hosts:
            host.kill_all()

    def describe_state(self) -> str:
        """Return the state of its jobs, and the daemons' last log lines."""
        raise NotImplementedError

    def wait_until(self, condition: Callable[[], bool], what: str, timeout: float = 30) -> None:
        """Poll until a condition is true; the error has the state of the daemons."""
        began, pause = time.monotonic(), 0.02
        while not condition():
            if time.monotonic() > began + scaled_timeout(timeout):
                raise ClusterError(f"waited {time.monotonic() - began:.0f} s for {what}\n{self.describe_state()}")
            time.sleep(pause)
            pause = min(pause * 1.2, 0.2)  # a scheduler's command takes more CPU time than most jobs here
