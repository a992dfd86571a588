"""The start of the zygote on this node: it imports torch while the launcher imports the rest of itself.

This module therefore imports little, and ``job_launch`` is imported once ``NodeStart`` is made.
"""

from __future__ import annotations

import os
import signal

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.options import Options
from ddplaunch.cli.option_variables import OPTION_VARIABLES
from ddplaunch.cli.planning import plan_zygote
from ddplaunch.core.agent.process_tree import LAUNCHER_VARIABLES, ProcessTree
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.options import Preemption
from ddplaunch.core.signals import STOP_SIGNALS
from ddplaunch.core.zygote_plan import ZygoteSettings
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.processes.proc_utils import FORWARDED_SIGNALS
from ddplaunch.system.processes.process_limits import check_proc


def plan_node_zygotes(options: Options, plan: Plan) -> tuple[ZygoteSettings, dict[str, str]]:
    """Return the settings of this node's zygotes, and the environment variables for the launcher's descendants."""
    own = LAUNCHER_VARIABLES.union(OPTION_VARIABLES)
    environ = {name: value for name, value in os.environ.items() if name not in own}
    return ZygoteSettings(plan_zygote(options, plan), options[Preemption].preempt_signal), environ


class NodeStart:
    """The event loop and the process tree of a job that is about to start on this node."""

    def __init__(self, options: Options, plan: Plan) -> None:
        """Start the zygote if the job has one node; with several nodes, it starts once the control port is bound.

        Raises UsageError if the value of an option is wrong, and ResourceLimitError if /proc cannot be used, or a limit
        on processes or memory is reached.
        """
        check_proc()
        self.loop = EventLoop()
        self.settings, environ = plan_node_zygotes(options, plan)
        source = load_features().make_zygote_source(options)
        self.tree = ProcessTree(self.loop, self.settings, environ, plan.run_id, source)
        if plan.nnodes == 1:
            # Until the loop has handlers for them, and unblocks them: a zygote must not outlive its launcher.
            signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, *FORWARDED_SIGNALS} - {signal.SIGCONT})
            if self.settings.preempt_signal is not None:
                signal.pthread_sigmask(signal.SIG_BLOCK, {self.settings.preempt_signal})
            self.tree.ensure_zygote(plan)
