"""What a rank is given when its turn to be started has come: its streams, rank 0's ties, and its job in words."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.agent import job
from ddplaunch.agent.attempt import Attempt
from ddplaunch.agent.first_rank import FirstRank
from ddplaunch.agent.policy import Policy
from ddplaunch.agent.preemption_file import PreemptionFile
from ddplaunch.control.port import Port
from ddplaunch.output.run_log import RunLog
from ddplaunch.output.screen import Screen
from ddplaunch.output.streams import Streams
from ddplaunch.plan.layout import Rank
from ddplaunch.plan.plan import Plan
from ddplaunch.target.target import Kind

if TYPE_CHECKING:
    from ddplaunch.rank.messages import Job


class Outfit:
    """Makes it, of what this node has for all of its ranks."""

    def __init__(
        self,
        screen: Screen,
        streams: Streams,
        log: RunLog,
        policy: Policy,
        preemption_file: PreemptionFile,
        port: Port | None,
    ) -> None:
        """``port`` is that of the job's store, None on a node without rank 0 or without a store."""
        self._screen = screen
        self._streams = streams
        self._log = log
        self._policy = policy
        self._preemption_file = preemption_file
        self._port = port

    def make(self, plan: Plan, attempt: Attempt, first_rank: FirstRank, rank: Rank) -> tuple[Job, dict[str, int]]:
        """Return the job of a rank (``agent/job.py``) and its descriptors by purpose, which the caller closes.

        Raises:
            OSError: too many files are open.
        """
        alone = plan.world_size == 1
        fds = self._streams.rank(
            rank.rank,
            reads=alone or rank.rank == self._policy.stdin,
            show=self._policy.show.streams(rank),
            log=self._log.rank_file(rank.rank, attempt.number),
        )
        if rank.rank == 0 and self._port and plan.target.kind is not Kind.PROGRAM:
            try:
                fds |= first_rank.descriptors(self._port, peers=not alone)
            except OSError:
                for fd in fds.values():
                    os.close(fd)
                raise
        described = job.describe(
            plan,
            rank,
            attempt.number,
            error_file=attempt.error_file(rank.rank),
            screen=self._screen,
            variables=self._preemption_file.variables(),
        )
        return described, fds
