"""What the file of each system has; nothing imports this when ddplaunch runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ddplaunch.clusters.finding import Allocation, Finding


class System(Protocol):
    """One system."""

    def find(self, environ: Mapping[str, str]) -> Finding | None:
        """Return what the system says about this process; None if it does not run it.

        Raises UsageError if a variable is missing, is not a number, or contradicts another.
        """


class Allocator(System, Protocol):
    """A batch system."""

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return what it has given this job; None if it has given nothing."""
