"""Request of ``ddplaunch debug``: attach a user to the debuggers of this node's ranks."""

from __future__ import annotations

from ddplaunch.base.errors import EXIT_USAGE
from ddplaunch.base.types import Count
from ddplaunch.core.control_socket.request import Request, RequestContext
from ddplaunch.features.debug.debugger_prompt import DebuggerPrompt
from ddplaunch.features.debug.messages import FROM_USER, MAX_INPUT_FRAME_BYTES, FromUser, TerminalResized, UserOutput
from ddplaunch.features.debug.node import DebugSide
from ddplaunch.features.debug.user_terminals import RemoteTerminal

NOT_PREPARED_ERROR = "this job has no debugger: start it in a terminal, or with --debug"


class DebugRanks(Request[UserOutput], frozen=True):
    """Attach to all ranks that are, or will be, at a breakpoint; ``stop``: pause this rank first.

    ``columns`` and ``rows``: the size of the user's terminal, 0 for a pipe. The client then sends the user's input.
    """

    stop: Count | None = None
    columns: Count = 0
    rows: Count = 0

    answers = (UserOutput,)

    @property
    def is_streaming(self) -> bool:
        return True

    def handle(self, context: RequestContext) -> None:
        side = context.job.find_side(DebugSide)
        server = side.server if side else None
        terminal = RemoteTerminal(context.send, context.finish, self.columns, self.rows)
        if server is None:
            terminal.show(f"ddplaunch: {NOT_PREPARED_ERROR}\n")
            return terminal.leave(EXIT_USAGE)
        prompt = DebuggerPrompt(server, terminal, context.guard, waits_for_stop=self.stop is not None)

        def on_message(message: FromUser) -> None:
            if isinstance(message, TerminalResized):
                terminal.set_size(message.columns, message.rows)
                prompt.on_resize()
            elif terminal.has_input:  # more would have to be kept here
                prompt.refuse("this client did not wait until its input was taken")
            else:
                terminal.has_input = True
                prompt.on_input(message.data)

        context.expect(FROM_USER, on_message, MAX_INPUT_FRAME_BYTES)
        context.on_job_end(lambda code: server.detach_user(prompt))
        server.attach_user(prompt)
        if self.stop is not None:
            server.pause_rank(self.stop)
