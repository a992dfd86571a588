"""The store of torch.distributed that node 0 hosts: its reserved port, or the file of ``--init-method file://``."""

from __future__ import annotations

import os
from contextlib import suppress

from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.agent.zygote_client import ZygoteClient
from ddplaunch.system.network.reserved_port import ReservedPort
from ddplaunch.system.plan.plan import Plan


class StoreHost:
    """Reserves the store's port for the whole job, and starts a new store for each attempt; unused on other nodes."""

    def __init__(self, plan: Plan, *, new_file_each_attempt: bool) -> None:
        """``new_file_each_attempt``: remove the store's file before each attempt: no other node can have made it.

        Raises UsageError if the port is taken, or the interface does not exist.
        """
        here = plan.holds_store
        self.port = ReservedPort(plan.master_addr, plan.master_port, nnodes=plan.nnodes) if here else None
        self.path = plan.store_file
        self._new_file_each_attempt = new_file_each_attempt

    def start_attempt(self) -> None:
        """Remove the file of an earlier attempt, whose entries would mislead the new one."""
        if self._new_file_each_attempt:
            self._remove_file()

    def open(self, zygote: ZygoteClient | None, ranks: NodeRanks) -> None:
        """Start the store of an attempt in a fork of the zygote, if the zygote has torch; else leave it to rank 0.

        Until the zygote is ready, the plan says who serves the store: ranks of other nodes may connect by then, and
        must not find a socket that rank 0 replaces.
        Raises UsageError if rank 0 had the port in the last attempt, and another program has taken it since.
        """
        ready = zygote if zygote and zygote.ready else None
        if ready:
            ranks.plan = ranks.plan.with_store(torch=ready.stores)
            if self.path:
                ready.remove_on_exit(self.path)
        if not self.port:
            return
        listening = self.port.listen()
        if not ranks.plan.agent_store:
            self.port.stop_listening()
        elif ready:
            ready.serve_store(listening)

    def close(self) -> None:
        self._remove_file()
        if self.port:
            self.port.close()

    def _remove_file(self) -> None:
        if self.path:
            with suppress(OSError):
                os.unlink(self.path)
