"""The launcher's part of torch's debug server: runs the process with its pages during each attempt."""

from __future__ import annotations

import os
import re
import sys

from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.helper_process import HelperProcess
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.events import AttemptSwept, Event, NoteAdded
from ddplaunch.core.feature import FeatureContext, NodeSide, RankSide
from ddplaunch.system.plan.launch_command import python_command
from ddplaunch.system.plan.rank_layout import Rank

_PORT = re.compile(rb"^port (\d+)$", re.MULTILINE)
_FRONTEND = "from ddplaunch.features.torch_debug.frontend import main; main()"
_MAX_OUTPUT_BYTES = 1 << 16


class DebugServerSide(NodeSide):
    """The node side of ``--torch-debug``: runs the process with the debug pages, one for each attempt."""

    def __init__(self, context: FeatureContext) -> None:
        self._context = context
        self._pages: HelperProcess | None = None
        self._output = b""  # of the process, until its port is known

    def make_rank_side(self, ranks: NodeRanks, rank: Rank) -> RankSide:
        return RankSide("features/torch_debug/rank/worker_server", {})

    def on_attempt_start(self, ranks: NodeRanks) -> None:
        self.close()
        self._output = b""
        first = ranks.plan.local_ranks[0]
        environ = {**os.environ, **ranks.plan.rank_environment(first, ranks.number)}
        try:
            self._pages = HelperProcess(
                self._context.loop,
                python_command(sys.executable, _FRONTEND),
                self._on_output,
                lambda: None,
                deadline=None,
                pipe_stdin=True,  # stdin ends with the launcher, and the process with stdin
                merge_stderr=True,
                environ=environ,
            )
        except OSError as error:  # the limit on processes
            self._context.job.emit(NoteAdded(f"torch's debug server cannot be started: {error.strerror}"))

    def observe(self, event: Event) -> None:
        if isinstance(event, AttemptSwept):
            self.close()

    def _on_output(self, data: bytes) -> None:
        if not data:
            lines = sanitize_line((self._output.decode(errors="replace").splitlines() or ["no output"])[-1])
            self._context.job.emit(NoteAdded(f"torch's debug server has ended: {lines}"))
            return self.close()
        self._output = (self._output + data)[-_MAX_OUTPUT_BYTES:]
        if found := _PORT.search(self._output):
            self._output = b""
            self._context.job.emit(NoteAdded(f"torch's debug server: http://127.0.0.1:{int(found[1])}"))

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()
            self._pages = None
