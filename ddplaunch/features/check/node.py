"""Checks this machine before its ranks start, when node 0 requests it.

A helper process runs the check: a dead file server or a hung driver blocks its caller. The process announces each step
in a line of JSON before the step begins. The launcher's loop is not blocked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial

from msgspec.structs import replace

from ddplaunch.base.event_loop import EventLoop, Timers
from ddplaunch.base.helper_process import HelperProcess
from ddplaunch.base.safe_files import current_folder
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.feature import FeatureContext, NodeSide
from ddplaunch.core.isolation import IsolatedLoop
from ddplaunch.core.messages import (
    CHECK_NOTICE_INTERVAL_S,
    CheckContinues,
    CheckPassed,
    CheckRequest,
    EndJob,
    JoinAccepted,
    Message,
    NodeStartError,
)
from ddplaunch.features.check.messages import CheckNode
from ddplaunch.system.plan.launch_command import START_TIMEOUT_S, python_command
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.processes.proc_utils import die_with_parent

STEP_TIMEOUT_S = 5.0  # for one step
CHECK_STATEMENT = "from ddplaunch.features.check.machine_check import main; main()"


class CheckSide(NodeSide):
    """Checks this node when node 0 requests it; a new request, or the start of the ranks, cancels a check."""

    def __init__(self, context: FeatureContext) -> None:
        self._context, self._plan = context, context.plan
        self._check: MachineCheck | None = None

    def on_message(self, message: Message) -> None:
        match message:
            case JoinAccepted(node_rank=int(node_rank)):
                self._plan = replace(self._plan, node_rank=node_rank)
            case EndJob():
                self.close()

    def on_check(self, request: CheckRequest) -> bool:
        if not isinstance(request, CheckNode):
            return False
        self.close()
        # Isolated on its own: node 0 waits for the reply even if the check raises an exception.
        loop = IsolatedLoop(self._context.loop, "the check of this machine", self._context.screen.show_note)
        loop.on_error = partial(self._on_check_error, request)
        loop.guard(self._start)(loop, request)
        return True

    def _on_check_error(self, request: CheckRequest) -> None:
        self.close()
        self._context.screen.show_footer("")
        self._context.job.send(CheckPassed(request.attempt))

    def _start(self, loop: IsolatedLoop, request: CheckRequest) -> None:
        context = self._context
        context.screen.show_footer("")  # all nodes have joined
        environ = {**context.tree.environ, **self._plan.shared_environment}
        progress, send = context.screen.show_footer, context.job.send
        try:
            self._check = MachineCheck(loop, request, self._plan, environ, context.log.path, progress, send)
        except OSError as error:
            send(NodeStartError(f"the check of this machine cannot start: {error.strerror}"))

    def on_attempt_start(self, ranks: NodeRanks) -> None:
        self.close()

    def close(self) -> None:
        if self._check is not None:
            self._check.close()


class MachineCheck:
    """A check of this machine, started by the constructor; ``on_progress`` gets what the check waits for."""

    def __init__(
        self,
        loop: EventLoop,
        request: CheckRequest,
        plan: Plan,
        environ: Mapping[str, str],
        log_dir: str | None,
        on_progress: Callable[[str], None],
        on_result: Callable[[CheckPassed | CheckContinues | NodeStartError], None],
    ) -> None:
        """``environ``: the variables of the ranks, with the GPUs that they see; ``log_dir``: the folder of the log.

        ``on_result`` is called every ``CHECK_NOTICE_INTERVAL_S``, and with the result.
        """
        self._loop, self._request, self._on_progress, self._on_result = loop, request, on_progress, on_result
        temporary = environ.get("TMPDIR") or "/tmp"
        folders = {"the current folder": current_folder(), "TMPDIR": temporary, "--log-dir": log_dir}
        arguments = (
            request.wait_s,
            sorted({rank.device for rank in plan.local_ranks} - {"cpu"}),
            {f"{what} ({path})": path for what, path in folders.items() if path},
        )
        self._text = b""
        self._step = "the check"
        self._child = HelperProcess(
            loop,
            [*python_command(sys.executable, CHECK_STATEMENT), json.dumps(arguments)],
            self._on_output,
            self._on_timeout,
            deadline=START_TIMEOUT_S,
            environ=environ,
            preexec_fn=die_with_parent,
        )
        self._deadline = START_TIMEOUT_S
        self._timers = Timers(loop.call_later)
        self._schedule_check_continues()

    def close(self) -> None:
        self._timers.cancel_all()
        self._child.close()

    def _schedule_check_continues(self) -> None:
        self._timers.cancel_all()
        self._timers.call_later(CHECK_NOTICE_INTERVAL_S, self._send_check_continues)

    def _send_check_continues(self) -> None:
        self._on_result(CheckContinues(self._request.attempt))
        self._schedule_check_continues()

    def _on_output(self, data: bytes) -> None:
        if not data:
            return self._finish(NodeStartError(f"the check of this machine ended unexpectedly at {self._step}"))
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            kind, text, hint = json.loads(line)
            match kind:
                case "checking":
                    self._step = text
                case "waiting":
                    self._on_progress(f"waiting for {text}")
                case "failed":
                    return self._finish(NodeStartError(text, hint))
                case _:
                    return self._finish(CheckPassed(self._request.attempt))
        self._deadline = STEP_TIMEOUT_S
        self._child.set_deadline(STEP_TIMEOUT_S)

    def _on_timeout(self) -> None:
        what = f"{self._step} did not answer in {self._deadline:g} s"
        self._finish(NodeStartError(what, "look at `mount`, `nvidia-smi` and dmesg"))

    def _finish(self, found: CheckPassed | NodeStartError) -> None:
        self.close()
        self._on_progress("")
        self._on_result(found)
