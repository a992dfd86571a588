"""What a rank is given when its turn to be started has come: its streams, and its job in words."""

from __future__ import annotations

import os
import signal

from ddplaunch import TYPE_CHECKING
from ddplaunch.agent.policy import NodeConfig
from ddplaunch.agent.ranks import NodeRanks
from ddplaunch.agent.store import StoreHost
from ddplaunch.agent.temporary import PreemptionFile
from ddplaunch.dataclass import dataclass
from ddplaunch.output.run_log import RunLog, snapshot_file
from ddplaunch.output.screen import Screen
from ddplaunch.output.streams import Streams
from ddplaunch.plan.layout import Rank
from ddplaunch.target.target import TargetKind

if TYPE_CHECKING:
    from ddplaunch.rank.messages import ProgramJob, PythonJob, RankFacts, RankJob

LAUNCHER_VARIABLES = frozenset(
    {"DDPLAUNCH_TOKEN", "DDPLAUNCH_EXIT_FILE", "DDPLAUNCH_REQUEUE_FILE", "DDPLAUNCH_OVER_SSH"}
)
"""Variables of the launcher that no rank gets."""


LONG_ATTEMPT_S = 300.0
"""Seconds since its first process group after which a rank that has done its work tells of its last collectives."""


def signals_to_block(warning: int | None) -> list[int]:
    """The scheduler's warning, which may come to every process of ours; but SIGTERM is how ranks are stopped too."""
    return [] if warning is None or warning in (signal.SIGTERM, signal.SIGHUP) else [warning]


@dataclass(frozen=True)
class NodeContext:
    """What this node has for all of its ranks, in every attempt."""

    policy: NodeConfig
    screen: Screen
    streams: Streams
    log: RunLog
    store: StoreHost
    preemption_file: PreemptionFile

    def build_rank_job(self, ranks: NodeRanks, rank: Rank, fds: dict[str, int]) -> RankJob:
        """Return the job of a rank; put into ``fds`` its descriptors by purpose, which the caller closes.

        Raises:
            OSError: too many files are open.
        """
        plan = ranks.plan
        reads = rank.rank == self.policy.stdin or (plan.world_size == 1 and not self.policy.has_live_view)
        log = self.log.rank_file(rank.rank, ranks.number)
        self.streams.open_rank(fds, rank.rank, has_stdin=reads, show=self.policy.show.streams_for(rank), log=log)
        if self.policy.inspect:
            fds["answers"] = ranks.open_channel(rank.rank)
        has_terminal = reads and os.isatty(0)  # which plain pdb keeps
        debugger = ranks.debug_server.socket_path() if ranks.debug_server and not has_terminal else ""
        return self._describe_job(ranks, rank, debugger)

    def _oom_snapshot_path(self, ranks: NodeRanks, rank: Rank) -> str:
        """Where a rank keeps the state of CUDA's allocator: in the log folder, or else where we were started."""
        name = snapshot_file(rank.rank, ranks.number)
        return self.log.file(name) or os.path.join(os.getcwd(), f"{ranks.plan.run_id}.{name}")

    def _describe_job(self, ranks: NodeRanks, rank: Rank, debugger: str) -> RankJob:
        plan, error_file = ranks.plan, ranks.rank_file_path(rank.rank, "json")
        target = plan.target
        environment = {**plan.environment(rank, ranks.number), **self.preemption_file.variables()}
        if error_file:
            environment["TORCHELASTIC_ERROR_FILE"] = error_file  # for torchelastic's ``@record`` too
        if self.screen.terminal:
            environment["DDPLAUNCH_TERMINAL"] = "1"  # for ddplaunch.runtime.progress, which sees pipes
        program: ProgramJob = {
            "rank": rank.rank,
            "kind": "program",
            "typed": target.text,
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
            "first": target.sys_path_0 or "",
            "facts": facts,
            "first_here": rank.local_rank == 0,
            "backend": plan.backend,
            "init_method": plan.init_method,
            "error_file": error_file,
            "trace_file": ranks.rank_file_path(rank.rank, "trace.json"),
            "trace_after": LONG_ATTEMPT_S,
            "oom_snapshot": self._oom_snapshot_path(ranks, rank) if self.policy.oom_report else "",
            "oom_summary": ranks.rank_file_path(rank.rank, "oom") or "",
            "debugger": debugger,
            "debugpy": rank.rank in self.policy.debugpy,
            "post_mortem": self.policy.post_mortem,
            "patient": self.policy.debug,
            "title": " ".join(target.argv),
        }
        return python
