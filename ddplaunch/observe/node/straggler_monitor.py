"""Reports stragglers: ranks that still run when others have ended, or when their own program has failed.

Often one of them hangs, and nothing else shows which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddplaunch.base.event_loop import Timer
from ddplaunch.base.text import MAX_LISTED_NAMES, format_count, format_ranks, join_names
from ddplaunch.core.agent.node_ranks import NodeRanks, RankProcess
from ddplaunch.core.agent.rank_files import read_exception_message
from ddplaunch.core.failures import first_line
from ddplaunch.core.isolation import IsolatedLoop
from ddplaunch.core.messages import FromNode
from ddplaunch.core.node.node_attempt import AttemptPhase
from ddplaunch.observe.diagnosis.inspection import Inspection
from ddplaunch.observe.diagnosis.stall_check import describe_locations
from ddplaunch.observe.messages import StragglersFound

NAME_DELAY_S = 30.0  # seconds from the end of a rank to the report: rank 0 may be writing the last checkpoint
FAILED_S = 5.0  # seconds from a program's failure to the report: threads may be uploading results

InspectStacks = Callable[[NodeRanks, Callable[["Inspection"], None]], None]


class StragglerMonitor:
    """Finds and reports the stragglers of one attempt on this node."""

    def __init__(
        self,
        loop: IsolatedLoop,
        ranks: NodeRanks,
        timeout: float | None,
        inspect: InspectStacks,
        send: Callable[[FromNode], None],
        notify: Callable[[str], None],
    ) -> None:
        """``inspect`` finds the stacks of this node's ranks; after ``timeout`` seconds, stragglers end the job."""
        self._loop, self._ranks, self._timeout_s = loop, ranks, timeout
        self._inspect, self._send, self._notify = inspect, send, notify
        self._timers: list[Timer] = []
        self._failed: dict[int, str] = {}  # by rank: the exception that ended its program, until it is reported
        self._noted: set[tuple[str, str]] = set()  # what failed ranks did, and what they do now, if it was reported
        ranks.on_failed = loop.guard(self._on_failed)

    def start_timers(self) -> None:
        """Restart the timers of the ranks that still run, as another rank may have ended."""
        for timer in self._timers:
            timer.cancel()
        self._timers = (
            [self._loop.call_later(NAME_DELAY_S, self._on_report_delay)]
            if self._remaining() or self._has_unstarted
            else []
        )
        if self._timers and self._timeout_s is not None and self._ranks.exit_codes:
            self._timers.append(self._loop.call_later(self._timeout_s, self._on_timeout))

    @property
    def _has_unstarted(self) -> bool:
        """Whether some ranks have not been started yet, though others may have ended already."""
        return self._ranks.attempt.phase is AttemptPhase.RUNNING and self._ranks.attempt.not_spawned > 0

    def _remaining(self) -> list[RankProcess]:
        ranks = self._ranks
        if ranks.attempt.phase is not AttemptPhase.RUNNING or ranks.attempt.failures:
            return []
        return [process for rank, process in ranks.processes.items() if not ranks.is_stop_requested(rank)]

    def _on_timeout(self) -> None:
        if self._ranks.is_holding:
            self.start_timers()
        elif self._remaining():
            self._send(StragglersFound(self._ranks.number))

    def _on_report_delay(self) -> None:
        if self._has_unstarted or self._ranks.is_holding:
            self.start_timers()
        elif self._remaining():
            self._inspect(self._ranks, self._on_inspected)

    def _on_inspected(self, inspection: Inspection) -> None:
        if stragglers := self._remaining():
            self._notify(self._format_note(stragglers, inspection))

    def _on_failed(self, rank: int, what: str) -> None:
        """Called when a rank's program has failed; the process runs on for its threads and ``atexit`` handlers."""
        if not self._failed:
            self._ranks.timers.call_later(FAILED_S, self._loop.guard(self._inspect_failed_ranks))
        self._failed[rank] = what

    def _inspect_failed_ranks(self) -> None:
        if self._ranks.is_holding:
            self._ranks.timers.call_later(FAILED_S, self._loop.guard(self._inspect_failed_ranks))
        elif any(each.rank.rank in self._failed for each in self._remaining()):
            self._inspect(self._ranks, self._report_failed_ranks)
        else:
            self._failed.clear()

    def _report_failed_ranks(self, inspection: Inspection) -> None:
        failed, self._failed = self._failed, {}
        groups: dict[tuple[str, str], list[RankProcess]] = {}  # by what they did, and what they do now
        for process in self._remaining():
            rank = process.rank.rank
            if rank in failed:
                recorded = read_exception_message(self._ranks.rank_file_path(rank, "json"))  # None while __str__ hangs
                what = failed[rank]
                how = f"called {what}" if what.startswith("sys.exit(") else f"raised {first_line(recorded or what)}"
                found = inspection.by_number.get(rank)
                place = (describe_locations([found]) or found.no_stack) if found else ""
                groups.setdefault((how, place), []).append(process)
        # On a machine with load ranks fail in the same way one after the other, and end slowly: one note for all.
        new = {key: some for key, some in groups.items() if key not in self._noted}
        self._noted.update(new)
        for (how, place), some in list(new.items())[:MAX_LISTED_NAMES]:
            self._notify(self._format_failed_ranks(some, how) + (f": {place}" if place else ""))
        if (more := sum(map(len, list(new.values())[MAX_LISTED_NAMES:]))) > 0:
            self._notify(f"{format_count(more, 'more rank')} failed, but did not exit")

    def _format_failed_ranks(self, ranks: Sequence[RankProcess], how: str) -> str:
        """Format "rank 1 on n1 (pid 4711) has raised ValueError, but is still running"; several ranks in the plural."""
        host = ranks[0].rank.host
        on = f" on {host}" if self._ranks.plan.nnodes > 1 and host else ""
        has, is_, pid = ("has", "is", "pid") if len(ranks) == 1 else ("have", "are", "pids")
        pids = join_names(str(each.pid) for each in ranks)
        who = f"{format_ranks(each.rank.rank for each in ranks)}{on} ({pid} {pids})"
        return f"{who} {has} {how}, but {is_} still running"

    def _format_note(self, stragglers: Sequence[RankProcess], inspection: Inspection) -> str:
        places = {rank.rank: describe_locations([rank]) for rank in inspection.ranks}
        on = f" on {stragglers[0].rank.host or 'this node'}" if self._ranks.plan.nnodes > 1 else ""
        described = []
        for each in stragglers[:MAX_LISTED_NAMES]:
            place = places.get(each.rank.rank)
            described.append(f"rank {each.rank.rank} (pid {each.pid})" + (f": {place}" if place else ""))
        more = f" and {len(stragglers) - MAX_LISTED_NAMES} more" if len(stragglers) > MAX_LISTED_NAMES else ""
        return f"the other ranks{on} are done; waiting for {'; '.join(described)}{more}"
