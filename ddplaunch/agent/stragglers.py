"""The ranks that still run on this node when others have ended, or when their own program has failed.

Often one hangs, and nothing else says which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.agent.ranks import Phase, RankProcess, Ranks
from ddplaunch.agent.remains import read_error_file
from ddplaunch.control.failure import brief
from ddplaunch.control.messages import FromNode, Straggling
from ddplaunch.loop import Loop, Timer
from ddplaunch.words import MAX_NAMED, counted

if TYPE_CHECKING:
    from ddplaunch.diagnosis.inspection import Inspection

STRAGGLING = 30.0  # seconds since a rank ended until the others are named: rank 0 may write the last checkpoint
FAILED_S = 5.0  # seconds since a program has failed until its rank is named: threads may upload the last results

Inspect = Callable[[Ranks, Callable[["Inspection"], None]], None]


class Stragglers:
    """The stragglers of one attempt."""

    def __init__(
        self,
        loop: Loop,
        ranks: Ranks,
        timeout: float | None,
        inspect: Inspect,
        tell: Callable[[FromNode], None],
        note: Callable[[str], None],
    ) -> None:
        """``inspect`` finds the stacks of this node's ranks; ``tell`` tells the job of those left after ``timeout``."""
        self._loop, self._ranks, self._timeout = loop, ranks, timeout
        self._inspect, self._tell, self._note = inspect, tell, note
        self._timers: list[Timer] = []
        self._failed: dict[int, str] = {}  # by which exception the program of a rank has ended, until that is noted
        ranks.on_failed = self._on_failed

    def await_them(self) -> None:
        """A rank may have ended: the time of those that still run begins now."""
        for timer in self._timers:
            timer.cancel()
        self._timers = [self._loop.after(STRAGGLING, self._name)] if self._left() or self._starting else []
        if self._timers and self._timeout is not None and self._ranks.codes:
            self._timers.append(self._loop.after(self._timeout, self._report))

    @property
    def _starting(self) -> bool:
        """Whether some are yet to start: a rank may have ended before."""
        return self._ranks.phase is Phase.RUNNING and self._ranks.pending > 0

    def _left(self) -> list[RankProcess]:
        ranks = self._ranks
        if ranks.phase is not Phase.RUNNING or ranks.failures:
            return []
        return [each for each in ranks.processes.values() if not each.signalled]

    def _report(self) -> None:
        if self._ranks.debugged:
            self.await_them()
        elif self._left():
            self._tell(Straggling(self._ranks.number))

    def _name(self) -> None:
        if self._starting or self._ranks.debugged:
            self.await_them()
        elif self._left():
            self._inspect(self._ranks, self._found)

    def _found(self, inspection: Inspection) -> None:
        if left := self._left():
            self._note(self._told(left, inspection))

    def _on_failed(self, rank: int, what: str) -> None:
        """The program of a rank has failed, and its process goes on until its threads and ``atexit`` are done."""
        if not self._failed:
            self._ranks.timers.after(FAILED_S, self._inspect_failed)
        self._failed[rank] = what

    def _inspect_failed(self) -> None:
        if self._ranks.debugged:
            self._ranks.timers.after(FAILED_S, self._inspect_failed)
        elif any(each.rank.rank in self._failed for each in self._left()):
            self._inspect(self._ranks, self._note_failed)
        else:
            self._failed.clear()

    def _note_failed(self, inspection: Inspection) -> None:
        failed, self._failed = self._failed, {}
        left = [each for each in self._left() if each.rank.rank in failed]
        for each in left[:MAX_NAMED]:
            rank, what = each.rank.rank, failed[each.rank.rank]
            on = f" on {each.rank.host}" if self._ranks.plan.nnodes > 1 and each.rank.host else ""
            recorded = read_error_file(self._ranks.file(rank, "json")).message  # none while its __str__ hangs
            how = f"called {what}" if what.startswith("sys.exit(") else f"raised {brief(recorded or what)}"
            found = inspection.by_number.get(rank)
            place = (diagnosis.stall.where([found]) or found.no_stack) if found else ""
            self._note(f"rank {rank}{on} (pid {each.pid}) has {how}, and still runs" + (f": {place}" if place else ""))
        if (more := len(left) - MAX_NAMED) > 0:
            self._note(f"{counted(more, 'more rank')} failed and still run")

    def _told(self, left: Sequence[RankProcess], inspection: Inspection) -> str:
        places = {rank.rank: diagnosis.stall.where([rank]) for rank in inspection.ranks}
        on = f" on {left[0].rank.host or 'this node'}" if self._ranks.plan.nnodes > 1 else ""
        told = []
        for each in left[:MAX_NAMED]:
            place = places.get(each.rank.rank)
            told.append(f"rank {each.rank.rank} (pid {each.pid})" + (f": {place}" if place else ""))
        more = f" and {len(left) - MAX_NAMED} more" if len(left) > MAX_NAMED else ""
        return f"the other ranks{on} are done; waiting for {'; '.join(told)}{more}"
