"""The context that all ranks of a node share, and the job that the zygote gets for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.agent.run_temp_dir import PreemptionFile
from ddplaunch.core.agent.store_host import StoreHost
from ddplaunch.core.node_config import NodeConfig
from ddplaunch.core.options import Output, Starting
from ddplaunch.core.output.run_log import RunLog
from ddplaunch.core.output.screen import Screen
from ddplaunch.core.output.streams import Streams
from ddplaunch.core.rank.zygote_messages import ProgramJob, PythonJob, RankJob
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.plan.rank_layout import Rank
from ddplaunch.system.target.signature import ArgumentValues
from ddplaunch.system.target.target import TargetKind

MakeRankSides = Callable[[NodeRanks, Rank], Iterable[tuple[str, Mapping[str, object]]]]
"""Makes the ``RankSide`` of each feature that has one for this rank."""


class NodeContext(Struct, frozen=True):
    """What all ranks of this node share, in every attempt."""

    config: NodeConfig
    screen: Screen
    streams: Streams
    log: RunLog
    store: StoreHost
    preemption_file: PreemptionFile

    def reads_stdin(self, plan: Plan, rank: Rank) -> bool:
        """Whether a rank has the launcher's own stdin."""
        return rank.rank == self.config.options[Output].stdin or (plan.world_size == 1 and not self.screen.reads_keys)

    def build_rank_job(self, make_sides: MakeRankSides, ranks: NodeRanks, rank: Rank, fds: dict[str, int]) -> RankJob:
        """Return the job of a rank; add its descriptors to ``fds`` by purpose, for the caller to close.

        Raises OSError if too many files are open.
        """
        reads = self.reads_stdin(ranks.plan, rank)
        log = self.log.rank_file_path(rank.rank, ranks.number)
        self.streams.open_rank(fds, rank.rank, has_stdin=reads, show=self.config.show.streams_for(rank), log=log)
        if self.config.inspect:
            fds["rank_channel"] = ranks.open_channel(rank.rank)
            if "stderr" in fds and ranks.plan.target.kind is not TargetKind.PROGRAM and ranks.plan.world_size > 1:
                fds["crash_socket"] = ranks.open_crash_socket(rank.rank)
        return self._make_rank_job(ranks, rank, make_sides)

    def _make_rank_job(self, ranks: NodeRanks, rank: Rank, make_sides: MakeRankSides) -> RankJob:
        plan, error_file = ranks.plan, ranks.rank_file_path(rank.rank, "json")
        target = plan.target
        environment = {**plan.rank_environment(rank, ranks.number), **self.preemption_file.variables()}
        if error_file:
            environment["TORCHELASTIC_ERROR_FILE"] = error_file  # for torchelastic's ``@record`` too
        if self.screen.terminal:
            environment["DDPLAUNCH_TERMINAL"] = "1"  # for ddplaunch.runtime.progress: the rank's streams are pipes
        program: ProgramJob = {
            "rank": rank.rank,
            "kind": "program",
            "target_text": target.text,
            "path": target.path or "",
            "args": list(plan.arguments(rank)),
            "env": environment,
            "cpus": list(rank.cpus) if rank.cpus else None,
        }
        if nice := self.config.options[Starting].nice:
            program["nice"] = nice
        if target.kind is TargetKind.PROGRAM:
            return program
        facts: ArgumentValues = {
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
            "sys_path_0": target.sys_path_0 or "",
            "facts": facts,
            "is_first_local": rank.local_rank == 0,
            "backend": plan.backend,
            "init_method": plan.init_method,
            "error_file": error_file,
            "title": " ".join(target.argv),
            "sides": [*make_sides(ranks, rank)],
        }
        return python
