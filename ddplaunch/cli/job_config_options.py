"""Builds the job config from the options: how nodes join, communicate, restart and stop; equal on all nodes."""

from __future__ import annotations

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Options
from ddplaunch.cli.cluster_detection import has_shared_log
from ddplaunch.cli.core_options import Connections, Elastic, Nodes, Preemption, Stopping, TimeLimit
from ddplaunch.core.feature import load_features
from ddplaunch.core.job_config import JobConfig
from ddplaunch.system.clusters.cluster_env import ClusterEnv


def check_control_port(port: int, master_port: int) -> None:
    """Check that the control port, by default the one after the master port, is at most 65535."""
    if port > 65535:
        raise UsageError(
            f"--master-port {master_port} leaves no port after it for --control-port", "add --control-port PORT"
        )


def read_job_config(options: Options, address: str, master_port: int, cluster_env: ClusterEnv | None) -> JobConfig:
    """Return the config of a job whose node 0 is at this address. Raises UsageError if it has no valid control port."""
    lowest, highest = options[Nodes].nnodes
    port = None
    if highest == 1 or options[Connections].control == "none":
        lowest, highest, address = 1, 1, ""
    else:
        port = options[Connections].control_port or master_port + 1
        check_control_port(port, master_port)
        if port == master_port:
            raise UsageError(f"--control-port {port} is the master port", "leave --control-port out, or give another")
    config = JobConfig(
        min_nodes=lowest,
        max_nodes=highest + options[Elastic].spares,
        spares=options[Elastic].spares,
        run_id=options[Nodes].run_id,
        token=options[Nodes].token,
        address=address,
        # of --master-addr the name is known, or wrong
        address_may_be_unknown=bool(cluster_env and cluster_env.address_may_be_unknown)
        and not options.is_set("master_addr"),
        port=port,
        interface=options[Nodes].interface,
        join_timeout=options[Connections].join_timeout,
        join_window=options[Elastic].join_window,
        heartbeat_timeout=options[Connections].heartbeat_timeout,
        grace=options[Stopping].grace,
        preempt_grace=options[Preemption].preempt_grace,
        max_restarts=options[Stopping].max_restarts,
        restart_on=options[Stopping].restart_on,
        restart_backoff=options[Stopping].restart_backoff,
        min_uptime=options[Stopping].min_uptime,
        max_membership_changes=options[Elastic].max_membership_changes,
        grow=options[Elastic].grow,
        allow_mismatch=options[Connections].allow_mismatch,
        timeout=options[TimeLimit].timeout,
        shared_log=has_shared_log(cluster_env),
        options=options,
    )
    for _, feature in load_features():
        config = feature.configure_job(config, options)
    return config
