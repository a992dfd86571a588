"""The debugger's part in the launcher: serves the ranks of each attempt, also at the launcher's own terminal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.core.failures import RankEnd
from ddplaunch.core.feature import FeatureContext, NodeSide, RankSide
from ddplaunch.core.messages import Message, StopAttempt
from ddplaunch.core.node.node_ranks import NodeRanks
from ddplaunch.core.output.screen import TerminalScreen
from ddplaunch.system.plan.rank_layout import Rank

if TYPE_CHECKING:
    from ddplaunch.features.debug.debug_server import DebugServer
    from ddplaunch.features.debug.launcher_terminal import LauncherTerminal


class DebugSide(NodeSide):
    """Has the debug server of this node, and ends the stops of its ranks when these are to end."""

    def __init__(self, context: FeatureContext) -> None:
        self._context = context
        self.server: DebugServer | None = None
        self._ranks: NodeRanks | None = None
        self._terminal: LauncherTerminal | None = None

    def on_attempt_start(self, ranks: NodeRanks) -> None:
        self._ranks = ranks
        if not self._context.config.waits_for_debugger:
            return
        if self.server is None:  # imported while the zygote imports torch
            from ddplaunch.features.debug.debug_server import DebugServer
            from ddplaunch.features.debug.launcher_terminal import LauncherTerminal

            context, config = self._context, self._context.config
            folder, note = context.tree.temp_dir, context.screen.show_note
            self.server = DebugServer(context.loop, folder, config.debug_timeout, context.job.rpc, note, context.send)
            if config.has_debug_prompt and isinstance(context.screen, TerminalScreen):
                self._terminal = LauncherTerminal(context.loop, context.screen)
                self.server.on_stop_unattended = self._terminal.attach
        self.server.start_attempt(ranks)

    def make_rank_side(self, ranks: NodeRanks, rank: Rank) -> RankSide | None:
        config = self._context.config
        settings = {
            "debugpy": rank.rank in config.debugpy,
            "socket": self._socket_path(rank.rank),
            "post_mortem": config.post_mortem,
            "long_timeouts": config.debug,
        }
        return RankSide("features/debug/rank/breakpoint_hooks", settings) if any(settings.values()) else None

    def _socket_path(self, rank: int) -> str:
        """Return the socket that the debugger of a rank connects to; "" if that uses a terminal, or none is wanted."""
        return self.server.socket_path() if self.server is not None and not self._has_terminal(rank) else ""

    def _has_terminal(self, rank: int) -> bool:
        """Whether a rank has the launcher's terminal, which plain pdb uses."""
        assert self._ranks is not None
        plan = self._ranks.plan
        return self._context.node.reads_stdin(plan, plan.rank_of(rank)) and os.isatty(0)

    def explain_end(self, end: RankEnd) -> str | None:
        if not end.error.rstrip().rpartition("\n")[2].startswith(("bdb.BdbQuit", "BdbQuit")):
            return None
        if "Caught BdbQuit in DataLoader worker" in end.error:  # torch/_utils.py, ExceptionWrapper
            return "a DataLoader worker cannot be stopped in a debugger: use num_workers=0"
        if self._ranks is None or self._ranks.plan.world_size == 1 or self._has_terminal(end.rank):
            return None
        if self._socket_path(end.rank):
            return f"pdb, ipdb, pudb and IPython wait for you; for other debuggers use --stdin {end.rank}"
        return "with --debug the rank waits at its breakpoint for `ddplaunch debug`"

    def on_message(self, message: Message) -> None:
        if self.server is not None and isinstance(message, StopAttempt):
            self.server.release_ranks(message.attempt)

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        if self._terminal is not None:
            self._terminal.close()
