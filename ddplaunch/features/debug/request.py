"""Request of ``ddplaunch debug``: attach a user to the debuggers of this node's ranks."""

from __future__ import annotations

from ddplaunch.base.types import Count
from ddplaunch.core.control_socket.request import Request, RequestContext
from ddplaunch.features.debug.messages import FROM_USER, MAX_FRAME_BYTES, TO_USER, DebuggerNotice, PauseRank, ToUser
from ddplaunch.features.debug.node import DebugSide

NOT_PREPARED_ERROR = "its ranks were not started for a debugger: that takes a terminal, or run --debug"


class DebugRanks(Request[ToUser], frozen=True):
    """Attach to all ranks that are, or will be, at a breakpoint; ``stop``: pause this rank first.

    After the request the client sends the user's input.
    """

    stop: Count | None = None

    answers = TO_USER

    @property
    def is_streaming(self) -> bool:
        return True

    def handle(self, context: RequestContext) -> None:
        side = context.job.find_side(DebugSide)
        server = side.server if side else None
        if server is None:
            context.send(DebuggerNotice(NOT_PREPARED_ERROR, is_refusal=True))
            context.finish()
            return
        user = context.guard(context.send)
        context.expect(FROM_USER, server.on_user_message, MAX_FRAME_BYTES)
        context.on_job_end(lambda code: server.detach_user(user))
        server.attach_user(user)
        if self.stop is not None:
            server.on_user_message(PauseRank(self.stop))
