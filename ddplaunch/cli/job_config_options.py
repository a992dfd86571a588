"""Builds the job config from the options: how nodes join, communicate, restart and stop; equal on all nodes."""

from __future__ import annotations

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.cluster_detection import has_shared_log
from ddplaunch.cli.option_values import AUTO
from ddplaunch.cli.run_options import SSH_OPTIONS, RunOptions
from ddplaunch.core.job_config import DEFAULT_GPU_MEMORY_TIMEOUT_S, DEFAULT_STALL_TIMEOUT_S, JobConfig
from ddplaunch.system.clusters.cluster_env import ClusterEnv


def uses_ssh(options: RunOptions) -> bool:
    """Whether --hosts or --hostfile is given. Raises UsageError for other SSH options without them."""
    if options.is_set("hosts") or options.is_set("hostfile"):
        return True
    for name in SSH_OPTIONS:
        if options.is_set(name):
            what = f"--{name.replace('_', '-')} works only with --hosts or --hostfile"
            raise UsageError(what, "--hosts n1:4,n2:4")
    return False


def check_node_options(options: RunOptions) -> None:
    """Check that the options about nodes do not contradict each other."""
    lowest, highest = options.nnodes
    if options.grow and lowest == highest:
        raise UsageError(f"--grow does not work with --nnodes {highest}", f"--nnodes {highest}:{highest + 1}")
    if options.control == "none" and lowest != highest:
        raise UsageError(f"--nnodes {lowest}:{highest} does not work with --control none", "leave --control none out")
    if options.spares and options.control == "none":
        what = f"--spares {options.spares} does not work with --control none: nodes do not notice lost nodes"
        raise UsageError(what, "leave one of them out")
    if options.spares and highest == 1:
        what = f"--spares {options.spares} works only with several nodes: a spare cannot replace node 0"
        raise UsageError(what, "--nnodes 2 or more; --max-restarts restarts the ranks of a single node")
    if options.spares and options.nproc and "," in options.nproc:
        what = (
            f"--nproc {options.nproc} does not work with --spares: a spare must have as many ranks as every other node"
        )
        raise UsageError(what, "give one number for all nodes")
    if options.control == "none" and options.node_rank == AUTO:
        raise UsageError("--node-rank auto does not work with --control none", "leave --control none out")


def check_inspect_options(options: RunOptions) -> None:
    """Check that options about inspection have what they need."""
    if options.gpu_memory_timeout is not None and not options.check:
        raise UsageError(f"--gpu-memory-timeout {options.gpu_memory_timeout:g} works only with --check", "add --check")


def check_time_limits(options: RunOptions) -> None:
    """Check the time limits."""
    stall, on_stall = options.stall_timeout, options.on_stall
    if on_stall and stall is None:
        raise UsageError(f"--on-stall {on_stall} works only with --stall-timeout", "add --stall-timeout 10m")
    if on_stall == "restart" and not options.max_restarts:
        raise UsageError("--on-stall restart works only with --max-restarts", "add --max-restarts 3")
    if stall is None:
        return
    for given, name, why in (
        (options.no_inspect, "--no-inspect", "it inspects the progress of the ranks"),
        (options.no_python, "--no-python", "only Python programs can be inspected"),
        (options.control == "none" and options.nnodes[1] > 1, "--control none", "each node sees only its own ranks"),
    ):
        if given:
            raise UsageError(f"--stall-timeout does not work with {name}: {why}", "leave one of them out")


def check_control_port(port: int, master_port: int) -> None:
    """Check that the control port, by default the one after the master port, is at most 65535."""
    if port > 65535:
        raise UsageError(
            f"--master-port {master_port} leaves no port after it for --control-port", "add --control-port PORT"
        )


def read_job_config(options: RunOptions, address: str, master_port: int, cluster_env: ClusterEnv | None) -> JobConfig:
    """Return the config of a job whose node 0 is at this address. Raises UsageError if it has no valid control port."""
    lowest, highest = options.nnodes
    port = None
    if highest == 1 or options.control == "none":
        lowest, highest, address = 1, 1, ""
    else:
        port = options.control_port or master_port + 1
        check_control_port(port, master_port)
        if port == master_port:
            raise UsageError(f"--control-port {port} is the master port", "leave --control-port out, or give another")
    strict = options.stall_timeout is not None
    return JobConfig(
        min_nodes=lowest,
        max_nodes=highest + options.spares,
        spares=options.spares,
        run_id=options.run_id,
        token=options.token,
        address=address,
        # of --master-addr the name is known, or wrong
        address_may_be_unknown=bool(cluster_env and cluster_env.address_may_be_unknown)
        and not options.is_set("master_addr"),
        port=port,
        interface=options.interface,
        join_timeout=options.join_timeout,
        join_window=options.join_window,
        heartbeat_timeout=options.heartbeat_timeout,
        grace=options.grace,
        preempt_grace=options.preempt_grace,
        checks_nodes=options.check,
        gpu_memory_timeout=DEFAULT_GPU_MEMORY_TIMEOUT_S
        if options.gpu_memory_timeout is None
        else options.gpu_memory_timeout,
        max_restarts=options.max_restarts,
        restart_on=options.restart_on,
        restart_backoff=options.restart_backoff,
        min_uptime=options.min_uptime,
        max_membership_changes=options.max_membership_changes,
        grow=options.grow,
        allow_mismatch=options.allow_mismatch,
        inspect=not options.no_inspect,
        timeout=options.timeout,
        stall_timeout=options.stall_timeout or DEFAULT_STALL_TIMEOUT_S,
        stall_strict=strict,
        on_stall=options.on_stall or ("stop" if strict else "report"),
        straggler_timeout=options.straggler_timeout,
        shared_log=has_shared_log(cluster_env),
    )
