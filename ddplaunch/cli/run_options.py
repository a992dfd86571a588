"""The options of ``ddplaunch run``: all groups, and the headings of the help."""

from __future__ import annotations

from typing import TypedDict

from ddplaunch.cli import core_options as core
from ddplaunch.cli import feature_options as features
from ddplaunch.core.options import OptionGroup, declared_options


class Inferred(TypedDict, total=False):
    """Values that hosts or the cluster environment can supply."""

    cluster: str
    nnodes: tuple[int, int]
    node_rank: int | None
    nproc: str | None
    master_addr: str | None
    master_port: int | None
    run_id: str | None
    control: str


SECTIONS = {
    heading: names.split()
    for heading, names in {
        "Target": "--module --no-python --pass-local-rank",
        "Ranks and devices": "--nproc --gpus --oversubscribe --virtual-local-rank --bind",
        "Several nodes": "--nnodes --node-rank --master-addr --master-port --interface --cluster --run-id --token",
        "Several nodes by SSH": "--hosts --hostfile --include --exclude --env --remote-python",
        "Connections between nodes": "--control --control-port --join-timeout --heartbeat-timeout --allow-mismatch",
        "Elastic jobs (--nnodes 2:4) and spares": "--spares --join-window --max-membership-changes --grow",
        "Starting ranks": "--backend --init-method --start --preload --warm --check --gpu-memory-timeout --role",
        "Stopping and restarting": "--grace --max-restarts --restart-on --restart-backoff --min-uptime --checkpoint",
        "Time limits": "--timeout --stall-timeout --on-stall --straggler-timeout",
        "Preemption": "--preempt-signal --preempt-grace --preempt-forward",
        "Sidecars, notifications and metrics": "--tensorboard --sidecar --notify --metrics",
        "Debugging": "--debug --debug-timeout --post-mortem --debugpy --oom-report",
        "Output": "--show --prefix --merge --stdin --ui --log-dir --log-json --no-history --no-inspect",
        "Dry run and help": "--no-config --dry-run --json --help --help-all",
    }.items()
}
"""The headings of ``--help-all`` and the options under each."""

# fmt: off
COMMON_OPTIONS = (
    "--module", "--nproc", "--gpus", "--nnodes", "--node-rank", "--master-addr", "--hosts", "--max-restarts",
    "--log-dir", "--dry-run", "--help", "--help-all",
)
# fmt: on
"""The options in ``--help``."""

# fmt: off
GROUPS: tuple[type[OptionGroup], ...] = (
    core.TargetOptions, core.Ranks, core.Nodes, features.SshHosts, core.Connections, core.Elastic, core.Starting,
    features.Preloading, features.Warming, features.Checking, core.Stopping, features.Recording, features.Inspecting,
    core.Preemption, features.Sidecars, features.Notifications, features.Metrics, features.Debugging,
    features.MemoryReport, core.Output, features.LiveDisplay, core.DryRun,
)
# fmt: on

OPTIONS = tuple(option for kind in GROUPS for option in declared_options(kind))
"""The options and arguments, in order."""

PARAMS = [option.to_click() for option in OPTIONS]
"""The same as options and arguments of click: also those of ``submit`` and ``manifest``."""
