"""A person's debugger in the ranks of this node."""

from __future__ import annotations

from ddplaunch.agent.debugger_messages import FROM_USER, MAX_FRAME_BYTES, TO_USER, DebugNotice, PauseRank, ToUser
from ddplaunch.dataclass import dataclass
from ddplaunch.job.door import RequestContext
from ddplaunch.job.requests import Request
from ddplaunch.wire.bounds import Count

NOT_PREPARED_ERROR = "its ranks were not started for debugging: that takes a terminal, or run --debug"


@dataclass(frozen=True)
class DebugRanks(Request[ToUser]):
    """Debug ranks, those at a breakpoint and those that come to one; first stop one that runs, if it is named.

    After the request the client says what the person types.
    """

    stop: Count | None = None

    answers = TO_USER

    @property
    def is_streaming(self) -> bool:
        return True

    def handle(self, asker: RequestContext) -> None:
        debugging = asker.job.debug_server()
        if debugging is None:
            asker.send(DebugNotice(NOT_PREPARED_ERROR, is_refusal=True))
            asker.finish()
            return
        person = asker.guard(asker.send)
        asker.expect(FROM_USER, debugging.on_user_message, MAX_FRAME_BYTES)
        asker.on_job_end(lambda code: debugging.detach_user(person))
        debugging.attach_user(person)
        if self.stop is not None:
            debugging.on_user_message(PauseRank(self.stop))
