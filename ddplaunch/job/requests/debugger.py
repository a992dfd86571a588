"""A person's debugger in the ranks of this node."""

from __future__ import annotations

from ddplaunch.agent.debugger_messages import FROM_PERSON, MAX_FRAME, TO_PERSON, Remark, StopRank, ToPerson
from ddplaunch.dataclass import dataclass
from ddplaunch.job.door import Asker
from ddplaunch.job.requests import Request
from ddplaunch.wire.bounds import Count

UNPREPARED = "its ranks were not started for debugging: that takes a terminal, or run --debug"


@dataclass(frozen=True)
class DebugRanks(Request[ToPerson]):
    """Debug ranks, those at a breakpoint and those that come to one; first stop one that runs, if it is named.

    After the request the client says what the person types.
    """

    stop: Count | None = None

    answers = TO_PERSON

    @property
    def lasts(self) -> bool:
        return True

    def serve(self, asker: Asker) -> None:
        debugging = asker.job.debugging()
        if debugging is None:
            asker.send(Remark(UNPREPARED, refuses=True))
            asker.finish()
            return
        person = asker.guard(asker.send)
        asker.hear(FROM_PERSON, debugging.take, MAX_FRAME)
        asker.at_end(lambda code: debugging.leave(person))
        debugging.attach(person)
        if self.stop is not None:
            debugging.take(StopRank(self.stop))
