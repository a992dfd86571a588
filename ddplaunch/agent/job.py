"""What a rank is given when its turn to be started has come: its streams, and its job in words."""

from __future__ import annotations

import os
import signal

from ddplaunch import TYPE_CHECKING
from ddplaunch.agent.policy import Policy
from ddplaunch.agent.ranks import Ranks
from ddplaunch.agent.store import Store
from ddplaunch.agent.temporary import PreemptionFile
from ddplaunch.dataclass import dataclass
from ddplaunch.output.run_log import RunLog, snapshot_file
from ddplaunch.output.screen import Screen
from ddplaunch.output.streams import Streams
from ddplaunch.plan.layout import Rank
from ddplaunch.target.target import TargetKind

if TYPE_CHECKING:
    from ddplaunch.rank.messages import ProgramJob, PythonJob, RankFacts, RankJob

OURS_ALONE = frozenset({"DDPLAUNCH_TOKEN", "DDPLAUNCH_EXIT_FILE", "DDPLAUNCH_REQUEUE_FILE", "DDPLAUNCH_OVER_SSH"})
"""Variables of the launcher that no rank gets."""


LONG = 300.0
"""Seconds since its first process group after which a rank that has done its work tells of its last collectives."""


def shielded(warning: int | None) -> list[int]:
    """The scheduler's warning, which may come to every process of ours; but SIGTERM is how ranks are stopped too."""
    return [] if warning is None or warning in (signal.SIGTERM, signal.SIGHUP) else [warning]


@dataclass(frozen=True)
class Outfit:
    """What this node has for all of its ranks, in every attempt."""

    policy: Policy
    screen: Screen
    streams: Streams
    log: RunLog
    store: Store
    preemption_file: PreemptionFile

    def prepare(self, ranks: Ranks, rank: Rank, fds: dict[str, int]) -> RankJob:
        """Return the job of a rank; put into ``fds`` its descriptors by purpose, which the caller closes.

        Raises:
            OSError: too many files are open.
        """
        plan = ranks.plan
        reads = rank.rank == self.policy.stdin or (plan.world_size == 1 and not self.policy.live)
        log = self.log.rank_file(rank.rank, ranks.number)
        self.streams.rank(fds, rank.rank, reads=reads, show=self.policy.show.streams(rank), log=log)
        if self.policy.inspect:
            fds["answers"] = ranks.line(rank.rank)
        has_terminal = reads and os.isatty(0)  # which plain pdb keeps
        debugger = ranks.debugging.path() if ranks.debugging and not has_terminal else ""
        return self._described(ranks, rank, debugger)

    def _snapshot(self, ranks: Ranks, rank: Rank) -> str:
        """Where a rank keeps the state of CUDA's allocator: in the log folder, or else where we were started."""
        name = snapshot_file(rank.rank, ranks.number)
        return self.log.file(name) or os.path.join(os.getcwd(), f"{ranks.plan.run_id}.{name}")

    def _described(self, ranks: Ranks, rank: Rank, debugger: str) -> RankJob:
        plan, error_file = ranks.plan, ranks.file(rank.rank, "json")
        target = plan.target
        environment = {**plan.environment(rank, ranks.number), **self.preemption_file.variables()}
        if error_file:
            environment["TORCHELASTIC_ERROR_FILE"] = error_file  # for torchelastic's ``@record`` too
        if self.screen.terminal:
            environment["DDPLAUNCH_TERMINAL"] = "1"  # for ddplaunch.runtime.progress, which sees pipes
        program: ProgramJob = {
            "rank": rank.rank,
            "kind": "program",
            "typed": target.typed,
            "path": target.path or "",
            "args": list(plan.arguments(rank)),
            "env": environment,
            "cpus": list(rank.cpus) if rank.cpus else None,
        }
        if target.kind is TargetKind.PROGRAM:
            return program
        facts: RankFacts = {
            "rank": rank.rank,
            "local_rank": int(environment["LOCAL_RANK"]),
            "node_rank": rank.node_rank,
            "nnodes": plan.nnodes,
            "world_size": plan.world_size,
            "local_world_size": plan.node_of(rank.node_rank).local_world_size,
            "device": environment["DDPLAUNCH_DEVICE"],
        }
        python: PythonJob = {
            **program,
            "kind": target.kind.value,
            "module": target.module or "",
            "function": target.function or "",
            "first": target.first or "",
            "facts": facts,
            "first_here": rank.local_rank == 0,
            "backend": plan.backend,
            "init_method": plan.init_method,
            "error_file": error_file,
            "trace_file": ranks.file(rank.rank, "trace.json"),
            "trace_after": LONG,
            "oom_snapshot": self._snapshot(ranks, rank) if self.policy.oom_report else "",
            "oom_summary": ranks.file(rank.rank, "oom") or "",
            "debugger": debugger,
            "debugpy": rank.rank in self.policy.debugpy,
            "post_mortem": self.policy.post_mortem,
            "patient": self.policy.debug,
            "title": " ".join(target.argv),
        }
        return python
