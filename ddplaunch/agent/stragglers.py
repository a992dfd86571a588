"""The ranks that still run on this node when others have ended, or when their own program has failed.

Often one hangs, and nothing else says which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.agent.ranks import AttemptPhase, NodeRanks, RankProcess
from ddplaunch.agent.remains import read_error_file
from ddplaunch.control.failure import first_line
from ddplaunch.control.messages import FromNode, StragglersFound
from ddplaunch.loop import EventLoop, Timer
from ddplaunch.words import MAX_LISTED_NAMES, format_count

if TYPE_CHECKING:
    from ddplaunch.diagnosis.inspection import Inspection

NAME_DELAY_S = 30.0  # seconds since a rank ended until the others are named: rank 0 may write the last checkpoint
FAILED_S = 5.0  # seconds since a program has failed until its rank is named: threads may upload the last results

InspectStacks = Callable[[NodeRanks, Callable[["Inspection"], None]], None]


class StragglerMonitor:
    """The stragglers of one attempt."""

    def __init__(
        self,
        loop: EventLoop,
        ranks: NodeRanks,
        timeout: float | None,
        inspect: InspectStacks,
        send: Callable[[FromNode], None],
        notify: Callable[[str], None],
    ) -> None:
        """``inspect`` finds the stacks of this node's ranks; ``send`` tells the job of those left after ``timeout``."""
        self._loop, self._ranks, self._timeout = loop, ranks, timeout
        self._inspect, self._tell, self._note = inspect, send, notify
        self._timers: list[Timer] = []
        self._failed: dict[int, str] = {}  # by which exception the program of a rank has ended, until that is noted
        ranks.on_failed = self._on_failed

    def start_timers(self) -> None:
        """A rank may have ended: the time of those that still run begins now."""
        for timer in self._timers:
            timer.cancel()
        self._timers = (
            [self._loop.call_later(NAME_DELAY_S, self._on_name_delay)]
            if self._remaining() or self._has_unstarted
            else []
        )
        if self._timers and self._timeout is not None and self._ranks.exit_codes:
            self._timers.append(self._loop.call_later(self._timeout, self._on_timeout))

    @property
    def _has_unstarted(self) -> bool:
        """Whether some are yet to start: a rank may have ended before."""
        return self._ranks.phase is AttemptPhase.RUNNING and self._ranks.not_spawned > 0

    def _remaining(self) -> list[RankProcess]:
        ranks = self._ranks
        if ranks.phase is not AttemptPhase.RUNNING or ranks.failures:
            return []
        return [each for each in ranks.processes.values() if not each.stop_requested]

    def _on_timeout(self) -> None:
        if self._ranks.has_debugged_rank:
            self.start_timers()
        elif self._remaining():
            self._tell(StragglersFound(self._ranks.number))

    def _on_name_delay(self) -> None:
        if self._has_unstarted or self._ranks.has_debugged_rank:
            self.start_timers()
        elif self._remaining():
            self._inspect(self._ranks, self._on_inspected)

    def _on_inspected(self, inspection: Inspection) -> None:
        if left := self._remaining():
            self._note(self._format_note(left, inspection))

    def _on_failed(self, rank: int, what: str) -> None:
        """The program of a rank has failed, and its process goes on until its threads and ``atexit`` are done."""
        if not self._failed:
            self._ranks.timers.call_later(FAILED_S, self._inspect_failed)
        self._failed[rank] = what

    def _inspect_failed(self) -> None:
        if self._ranks.has_debugged_rank:
            self._ranks.timers.call_later(FAILED_S, self._inspect_failed)
        elif any(each.rank.rank in self._failed for each in self._remaining()):
            self._inspect(self._ranks, self._note_failed)
        else:
            self._failed.clear()

    def _note_failed(self, inspection: Inspection) -> None:
        failed, self._failed = self._failed, {}
        left = [each for each in self._remaining() if each.rank.rank in failed]
        for each in left[:MAX_LISTED_NAMES]:
            rank, what = each.rank.rank, failed[each.rank.rank]
            on = f" on {each.rank.host}" if self._ranks.plan.nnodes > 1 and each.rank.host else ""
            recorded = read_error_file(self._ranks.rank_file_path(rank, "json")).message  # none while its __str__ hangs
            how = f"called {what}" if what.startswith("sys.exit(") else f"raised {first_line(recorded or what)}"
            found = inspection.by_number.get(rank)
            place = (diagnosis.stall.describe_locations([found]) or found.no_stack) if found else ""
            self._note(f"rank {rank}{on} (pid {each.pid}) has {how}, and still runs" + (f": {place}" if place else ""))
        if (more := len(left) - MAX_LISTED_NAMES) > 0:
            self._note(f"{format_count(more, 'more rank')} failed and still run")

    def _format_note(self, left: Sequence[RankProcess], inspection: Inspection) -> str:
        places = {rank.rank: diagnosis.stall.describe_locations([rank]) for rank in inspection.ranks}
        on = f" on {left[0].rank.host or 'this node'}" if self._ranks.plan.nnodes > 1 else ""
        told = []
        for each in left[:MAX_LISTED_NAMES]:
            place = places.get(each.rank.rank)
            told.append(f"rank {each.rank.rank} (pid {each.pid})" + (f": {place}" if place else ""))
        more = f" and {len(left) - MAX_LISTED_NAMES} more" if len(left) > MAX_LISTED_NAMES else ""
        return f"the other ranks{on} are done; waiting for {'; '.join(told)}{more}"
