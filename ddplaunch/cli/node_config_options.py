"""Builds the node config from the options: how this node starts its ranks, what it shows."""

from __future__ import annotations

import os

from ddplaunch.base.options import Options
from ddplaunch.cli.cluster_detection import OVER_SSH_VARIABLE
from ddplaunch.cli.console_output import is_colour_allowed
from ddplaunch.cli.show_option import merges_equal_lines
from ddplaunch.core.node_config import NodeConfig, ScreenOptions, ShowRules
from ddplaunch.core.options import Inspecting, Output
from ddplaunch.core.output.sink import READER_TIMEOUT_S
from ddplaunch.core.zygote_plan import ZygoteSettings
from ddplaunch.system.clusters.cluster_env import ClusterEnv
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.target.target import TargetKind

OUTPUT_TIMEOUT_OVER_SSH_S = 1e6
"""Practically infinite: ssh always reads the launcher's output, sometimes slowly, and notices if the launcher ends."""

QUIET_WAIT_S = 5.0
"""Nodes that are started together report only after this time that they wait for others."""


def build_node_config(
    options: Options,
    plan: Plan,
    show: ShowRules,
    zygote: ZygoteSettings,
    cluster_env: ClusterEnv | None,
) -> NodeConfig:
    """Return the node config; ``cluster_env`` is that of a system which starts all nodes at once."""
    by_ssh = OVER_SSH_VARIABLE in os.environ
    return NodeConfig(
        zygote=zygote,
        show=show,
        screen=ScreenOptions(
            prefix=options[Output].prefix,
            output_timeout_s=OUTPUT_TIMEOUT_OVER_SSH_S if by_ssh else READER_TIMEOUT_S,
            quiet_s=QUIET_WAIT_S if by_ssh or cluster_env is not None else 0.0,
            colour=is_colour_allowed(),
            merge=merges_equal_lines(options),
        ),
        inspect=not options[Inspecting].no_inspect and plan.target.kind is not TargetKind.PROGRAM,
        options=options,
    )
