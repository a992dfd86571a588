"""What this node has of the job's store: its port, on node 0, or the file of ``--init-method file://``."""

from __future__ import annotations

import os
from contextlib import suppress

from ddplaunch.agent.ranks import NodeRanks
from ddplaunch.agent.zygote_client import ZygoteClient
from ddplaunch.control.port import ReservedPort
from ddplaunch.plan.plan import Plan


class StoreHost:
    """The port is ours until the end, and each attempt has a new store there; on other nodes there is nothing."""

    def __init__(self, plan: Plan, *, new_file_each_attempt: bool) -> None:
        """``new_file_each_attempt``: whether nobody else begins an attempt before us, so that each may have a new file.

        Raises:
            UsageError: the port is taken, or there is no such interface.
        """
        here = plan.hosts_store
        self.port = ReservedPort(plan.master_addr, plan.master_port, nnodes=plan.nnodes) if here else None
        method = plan.init_method or ""
        # torch makes the file, and nobody else removes it
        self.path = method.removeprefix("file://") if here and method.startswith("file://") else None
        self._fresh = new_file_each_attempt

    def start_attempt(self) -> None:
        """An attempt begins: what an earlier one wrote would mislead it."""
        if self._fresh:
            self._remove_file()

    def open(self, zygote: ZygoteClient | None, ranks: NodeRanks) -> None:
        """Have a process of the zygote hold the store of an attempt, where that has torch; else rank 0 opens its own.

        Until it is ready we go by what it was to import: ranks of other nodes may connect by then, and must not meet a
        socket that rank 0 replaces.

        Raises:
            UsageError: rank 0 had the port in the attempt before, and another program has taken it since.
        """
        ready = zygote if zygote and zygote.ready else None
        if ready:
            ranks.plan = ranks.plan.with_store(torch=ready.stores)
        if not self.port:
            return
        listening = self.port.listen()
        if not ranks.plan.agent_store:
            self.port.cede()
        elif ready:
            ready.serve_store(listening.dup().detach())

    def close(self) -> None:
        self._remove_file()
        if self.port:
            self.port.close()

    def _remove_file(self) -> None:
        if self.path:
            with suppress(OSError):
                os.unlink(self.path)
