"""What this node has of the job's store: its port, or the file behind ``--init-method file://``."""

from __future__ import annotations

import os
from contextlib import suppress

from ddplaunch.control.port import Port
from ddplaunch.plan.plan import Plan


class Store:
    """The port is ours until the end, and each attempt's rank 0 listens there; on other nodes there is nothing."""

    def __init__(self, plan: Plan, *, fresh: bool) -> None:
        """``fresh``: whether nobody else begins an attempt before us, so that each may have a new file.

        Raises:
            UsageError: the port is taken, or there is no such interface.
        """
        here = plan.hosts_store
        self.port = Port(plan.master_addr, plan.master_port, nnodes=plan.nnodes) if here else None
        method = plan.init_method or ""
        # torch makes the file, and nobody else removes it
        self.path = method.removeprefix("file://") if here and method.startswith("file://") else None
        self._fresh = fresh

    def begin(self) -> None:
        """An attempt begins: what an earlier one wrote would mislead it."""
        if self._fresh:
            self._remove()

    def close(self) -> None:
        self._remove()
        if self.port:
            self.port.close()

    def _remove(self) -> None:
        if self.path:
            with suppress(OSError):
                os.unlink(self.path)
