"""Builds the job config from the options: how nodes join, communicate, restart and stop; equal on all nodes."""

from __future__ import annotations

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.cluster_detection import has_shared_log
from ddplaunch.cli.core_options import Connections, Elastic, Nodes, Preemption, Stopping, TimeLimit
from ddplaunch.core.job_config import DEFAULT_GPU_MEMORY_TIMEOUT_S, DEFAULT_STALL_TIMEOUT_S, JobConfig
from ddplaunch.core.options import Options
from ddplaunch.features.check.options import Checking
from ddplaunch.features.inspect.options import Hangs, Inspecting
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
    hangs, gpu_memory_timeout = options[Hangs], options[Checking].gpu_memory_timeout
    strict = hangs.stall_timeout is not None
    return JobConfig(
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
        checks_nodes=options[Checking].check,
        gpu_memory_timeout=DEFAULT_GPU_MEMORY_TIMEOUT_S if gpu_memory_timeout is None else gpu_memory_timeout,
        max_restarts=options[Stopping].max_restarts,
        restart_on=options[Stopping].restart_on,
        restart_backoff=options[Stopping].restart_backoff,
        min_uptime=options[Stopping].min_uptime,
        max_membership_changes=options[Elastic].max_membership_changes,
        grow=options[Elastic].grow,
        allow_mismatch=options[Connections].allow_mismatch,
        inspect=not options[Inspecting].no_inspect,
        timeout=options[TimeLimit].timeout,
        stall_timeout=hangs.stall_timeout or DEFAULT_STALL_TIMEOUT_S,
        stall_strict=strict,
        on_stall=hangs.on_stall or ("stop" if strict else "report"),
        straggler_timeout=hangs.straggler_timeout,
        shared_log=has_shared_log(cluster_env),
    )
