"""The debugger's part in the launcher: serves the ranks of each attempt, also at the launcher's own terminal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.base.tty import can_move_cursor, in_foreground, is_interactive
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.feature import FeatureContext, NodeSide, RankSide
from ddplaunch.core.messages import Message, StopAttempt
from ddplaunch.core.options import Output
from ddplaunch.core.output.log_message import FORMATTER
from ddplaunch.core.output.screen import TerminalScreen
from ddplaunch.features.debug.options import Debugging
from ddplaunch.system.plan.rank_layout import Rank

if TYPE_CHECKING:
    from ddplaunch.features.debug.debug_server import DebugServer
    from ddplaunch.features.debug.user_terminals import LocalTerminal


class DebugSide(NodeSide):
    """Runs the debug server of this node, and resumes the node's ranks before they are stopped."""

    def __init__(self, context: FeatureContext) -> None:
        self._context, self._options = context, context.options[Debugging]
        self._debugpy_ranks = self._options.debugpy_ranks()
        self._has_terminal = _has_interactive_terminal()
        self.server: DebugServer | None = None
        self._ranks: NodeRanks | None = None
        self._terminal: LocalTerminal | None = None
        context.loop.on_error = self._on_error

    def on_attempt_start(self, ranks: NodeRanks) -> None:
        self._ranks = ranks
        context, options = self._context, self._options
        if not (self._has_terminal or options.debug or options.post_mortem):
            return  # no rank stops at a breakpoint
        if self.server is None:  # imported while the zygote imports torch
            from ddplaunch.features.debug.debug_server import DebugServer

            folder, note = context.tree.temp_dir, context.screen.show_note
            self.server = DebugServer(
                context.loop, folder, options.debug_timeout, context.job.rpc, note, context.job.send
            )
            if self._has_terminal and context.options[Output].stdin is None:
                self.server.on_stop_unattended = self._attach_terminal
        self.server.start_attempt(ranks)

    def _attach_terminal(self) -> None:
        from ddplaunch.features.debug import debugger_prompt, user_terminals

        screen, loop = self._context.screen, self._context.loop
        if self.server is not None and isinstance(screen, TerminalScreen) and not screen.reads_keys:
            terminal = self._terminal = user_terminals.LocalTerminal(loop, screen)
            prompt = debugger_prompt.DebuggerPrompt(self.server, terminal, loop.guard)
            terminal.on_input, terminal.on_resize = prompt.on_input, prompt.on_resize
            self.server.attach_user(prompt)

    def make_rank_side(self, ranks: NodeRanks, rank: Rank) -> RankSide | None:
        settings = {
            "debugpy": rank.rank in self._debugpy_ranks,
            "socket": self._socket_path(rank.rank),
            "post_mortem": self._options.post_mortem,
            "long_timeouts": self._options.debug,
        }
        return RankSide("features/debug/rank/breakpoint_hooks", settings) if any(settings.values()) else None

    def _socket_path(self, rank: int) -> str:
        """Return the path of the debug server's socket for a rank; "" if the rank has a terminal, or there is none."""
        return self.server.socket_path() if self.server is not None and not self._rank_has_terminal(rank) else ""

    def _rank_has_terminal(self, rank: int) -> bool:
        """Whether a rank has the launcher's terminal, which plain pdb uses."""
        assert self._ranks is not None
        plan = self._ranks.plan
        return self._context.node.reads_stdin(plan, plan.rank_of(rank)) and os.isatty(0)

    def explain_failure(self, failure: RankFailure, peak_bytes: int) -> str | None:
        text, rank = failure.exception_text, failure.rank
        if not text.rstrip().rpartition("\n")[2].startswith(("bdb.BdbQuit", "BdbQuit")):
            return None
        if "Caught BdbQuit in DataLoader worker" in text:  # torch/_utils.py, ExceptionWrapper
            return "a DataLoader worker cannot be stopped in a debugger: use num_workers=0"
        if self._ranks is None or self._ranks.plan.world_size == 1 or self._rank_has_terminal(rank):
            return None
        if self._socket_path(rank):
            return f"pdb, ipdb, pudb and IPython wait for you; for other debuggers use --stdin {rank}"
        return "with --debug the rank waits at its breakpoint for `ddplaunch debug`"

    def on_message(self, message: Message) -> None:
        if self.server is not None and isinstance(message, StopAttempt):
            self.server.release_ranks(message.attempt)

    def _on_error(self) -> None:
        """Resume the ranks, which no user can reach after a bug in this class; then time limits count again."""
        try:
            if self.server is not None and self._ranks is not None:
                self.server.release_ranks(self._ranks.number)
        finally:
            self.close()
            self.server = self._terminal = None

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        if self._terminal is not None:
            self._terminal.close()


def _has_interactive_terminal() -> bool:
    """Whether a user at this terminal can type commands to a rank's debugger."""
    return in_foreground(0) and (is_interactive(1) or is_interactive(2)) and can_move_cursor() and not FORMATTER.as_json
