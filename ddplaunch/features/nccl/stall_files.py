"""Collects the evidence of one stall on this node: dumps of flight recorders, and on node 0 the report of NCCL's RAS.

The ranks write their dumps themselves (``observe/rank/torch_state.py``), straight into the folder: ``rank_0`` for NCCL,
``rank_0.json`` for other backends. The RAS service is asked in a thread, as it may not reply.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread

import click

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.safe_files import open_for_writing
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.features.nccl.ras_client import ask_service
from ddplaunch.features.nccl.ras_report import RasReport, is_of_job
from ddplaunch.observe.diagnosis.inspection import Inspection
from ddplaunch.observe.stacks_text import render_stacks
from ddplaunch.system.processes.proc_utils import read_stat

MAX_RANK_BYTES = 16 << 20  # of a dump; 2,000 operations with the lines of their calls take some 4 MiB
MAX_NODE_BYTES = 128 << 20  # of all dumps of this node in a job
COLLECT_TIMEOUT_S = 3.0
DUMP_TIMEOUT_S = 1.0  # for the dumps of a job without NCCL; a rank in which the GIL is held writes no dump
_POLL_INTERVAL_S = 0.02

STACKS_FILE = "stacks.txt"


class StallFiles:
    """Collects the evidence of one stall, from ``begin`` until it calls ``on_done``."""

    def __init__(
        self,
        loop: EventLoop,
        ranks: NodeRanks,
        folder: str,
        address: tuple[str, int] | None,
        on_done: Callable[[StallFiles], None],
    ) -> None:
        """``address``: of the RAS service; None: do not query it.

        ``on_done`` is called once, after ``begin`` and within COLLECT_TIMEOUT_S.
        Raises OSError if the folder cannot be made.
        """
        self._loop, self._ranks, self.folder, self._on_done = loop, ranks, folder, on_done
        began = time.monotonic()
        self._deadline = began + COLLECT_TIMEOUT_S
        self._dump_deadline = self._deadline if address else began + DUMP_TIMEOUT_S
        self._awaited: set[int] = set()  # ranks whose dumps may still come
        self.dumped: list[int] = []  # ranks with a dump
        self.ras: RasReport | None = None  # which came in time
        self.ras_file = ""  # the name of the file with that report; "" if none was written
        self._ras_reply: RasReport | None = None  # set by the thread, also after the deadline
        os.makedirs(folder, 0o700, exist_ok=True)
        self._asking: Thread | None = None
        if address is not None:
            pids = [process.pid for process in ranks.processes.values()]
            ours = partial(is_of_job, pids=pids, world_size=ranks.plan.world_size)
            self._asking = Thread(target=self._ask, args=(address, ours), daemon=True)

    def _ask(self, address: tuple[str, int], is_ours: Callable[[RasReport], bool]) -> None:
        self._ras_reply = ask_service(address, self._deadline, is_ours)

    def begin(self, max_bytes: int) -> None:
        """Request the dumps, ``max_bytes`` in all. Raises OSError if dumps of an earlier stall cannot be removed."""
        numbers = [*self._ranks.processes]
        limit = min(MAX_RANK_BYTES, max_bytes // max(1, len(numbers)))
        for number in numbers:
            self._remove_dump(number)  # of an earlier stall
            channel = self._ranks.channels.get(number)
            if channel is not None and channel.has_thread and limit and not self._is_stopped(number):
                channel.write_line(b"w %d " % limit + os.fsencode(os.path.join(self.folder, f"rank_{number}")))
                self._awaited.add(number)
        if self._asking is not None:
            self._asking.start()
        self._loop.call_later(0.0, self._poll)

    def _is_stopped(self, number: int) -> bool:
        fields = read_stat(self._ranks.processes[number].pid)
        return bool(fields) and fields[0] in b"Tt"

    def _remove_dump(self, number: int) -> None:
        for path in self._dump_paths(number):
            if os.path.exists(path):
                os.unlink(path)

    def _dump_paths(self, number: int) -> tuple[str, str]:
        path = os.path.join(self.folder, f"rank_{number}")
        return path, f"{path}.json"

    def _poll(self) -> None:
        for number in [*self._awaited]:
            if any(map(os.path.exists, self._dump_paths(number))):
                self.dumped.append(number)
                self._awaited.discard(number)
        self._awaited &= self._ranks.processes.keys()
        waits_for_ranks = self._awaited and time.monotonic() < self._dump_deadline
        waits_for_ras = self._asking is not None and self._asking.is_alive() and time.monotonic() < self._deadline
        if waits_for_ranks or waits_for_ras:
            self._loop.call_later(_POLL_INTERVAL_S, self._poll)
            return
        self.dumped.sort()
        self.ras = self._ras_reply
        if self.ras is not None:
            name = "nccl-ras.json" if self.ras.is_json else "nccl-ras.txt"
            self.ras_file = name if self.write(name, self.ras.text) else ""
        self._on_done(self)

    @property
    def dump_bytes(self) -> int:
        """The size of the dumps."""
        size = 0
        for path in (path for number in self.dumped for path in self._dump_paths(number)):
            with suppress(OSError):  # each rank has written one of its two files
                size += os.path.getsize(path)
        return size

    def write_stacks(self, inspection: Inspection, *remarks: str) -> bool:
        """Write the output of ``ddplaunch stacks``, and remarks, to a file; return whether it was written."""
        text = click.unstyle(render_stacks(inspection))
        return self.write(STACKS_FILE, "\n".join([text, *remarks, ""]) if remarks else text)

    def write(self, name: str, text: str) -> bool:
        """Write a file into the folder of the evidence; return whether it was written: the disk may be full."""
        path = os.path.join(self.folder, name)
        try:
            with open(open_for_writing(path, os.O_TRUNC, 0o600), "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except OSError:
            return False
        return True
