"""Builds the job config from the options: how nodes join, communicate, restart and stop; equal on all nodes.

Before a job of several nodes starts, its options are checked with the plan and this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ddplaunch.base.errors import EXIT_UNAVAILABLE, LaunchError, UsageError
from ddplaunch.base.options import Options
from ddplaunch.cli.cluster_detection import has_shared_log
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.options import Connections, Elastic, Nodes
from ddplaunch.system.clusters.cluster_env import ClusterEnv
from ddplaunch.system.network.addresses import (
    UnresolvableName,
    check_interface,
    check_local_address,
    list_reachable_addresses,
)
from ddplaunch.system.plan.plan import Plan

_NAME_RETRY_S = 1.0  # between two look-ups of node 0's own name


class NameLookupTimedOut(LaunchError):
    """Node 0's own name did not resolve within --join-timeout."""

    exit_code = EXIT_UNAVAILABLE


def check_control_port(port: int, master_port: int) -> None:
    """Check that the control port, by default the one after the master port, is at most 65535."""
    if port > 65535:
        raise UsageError(
            f"--master-port {master_port} leaves no port after it for --control-port", "add --control-port PORT"
        )


def build_job_config(options: Options, address: str, master_port: int, cluster_env: ClusterEnv | None) -> JobConfig:
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
        address=address,
        # a name that was given by --master-addr is known, or wrong
        address_may_be_unknown=bool(cluster_env and cluster_env.address_may_be_unknown)
        and not options.is_set("master_addr"),
        port=port,
        shared_log=has_shared_log(cluster_env),
        options=options,
    )
    for name, feature in load_features():
        config = load_features().call(name, feature.configure_job, config, options) or config
    return config


def check_node_options(plan: Plan, config: JobConfig, note: Callable[[str], object]) -> None:
    """Raise UsageError if an option for the nodes is missing, or contradicts the plan or this machine.

    On node 0 its own name must resolve, which may take a while: ``note`` is called once while waiting for it.
    """
    if interface := config.options[Nodes].interface:
        check_interface(interface)
    if plan.nnodes > 1:
        if config.port is None:
            _check_without_control(plan)
        else:
            _check_joining(config, plan, note)


def _check_without_control(plan: Plan) -> None:
    if plan.missing_options:
        *first, last = plan.missing_options
        names = f"{', '.join(first)} and {last}" if first else last
        raise UsageError(
            f"--control none on {plan.nnodes} nodes needs {names}",
            "ddplaunch run … --dry-run writes the command for each node",
        )
    if plan.max_restarts:
        raise UsageError(
            f"--max-restarts {plan.max_restarts} does not work with --control none: each node would restart alone",
            "leave one of them out",
        )


def _check_joining(config: JobConfig, plan: Plan, note: Callable[[str], object]) -> None:
    others = f"1 to {plan.nnodes - 1}" if plan.nnodes > 2 else "1"
    if "--node-rank" in plan.missing_options:
        rest = f"{others} on the other{'s' * (plan.nnodes > 2)}"
        raise UsageError(
            f"--node-rank is missing: which of the {plan.nnodes} nodes is this?",
            f"--node-rank 0 on the node whose address is --master-addr, {rest}\n"
            "--node-rank auto numbers them as they join",
        )
    if "--master-addr" in plan.missing_options:
        if plan.node_rank:
            raise UsageError(
                f"--master-addr is missing: where is node 0 of these {plan.nnodes} nodes?",
                "`hostname -I` on node 0 shows its addresses; give the same one on every node",
            )
        example = next(list_reachable_addresses(), "10.0.0.1")
        raise UsageError(
            "--master-addr is missing: where do the other nodes reach this one?",
            f"--master-addr {example} on every node; it is an address of this machine",
        )
    if plan.node_rank == 0 and plan.has_node_rank and not config.address_may_be_unknown:
        _wait_for_name(plan.master_addr, config.options[Connections].join_timeout, note)


def _wait_for_name(address: str, timeout_s: float, note: Callable[[str], object]) -> None:
    """Wait until ``address`` resolves (Docker compose may add it later); check that it is one of this machine.
    Raises NameLookupTimedOut if it does not resolve in ``timeout_s`` seconds, UsageError if it is another machine's.
    """
    deadline, noted = time.monotonic() + timeout_s, False
    while True:
        try:
            return check_local_address(address)
        except UnresolvableName as error:
            if time.monotonic() > deadline:
                message = f"{error.message} in {timeout_s:g} s (--join-timeout)"
                raise NameLookupTimedOut(message, error.hint) from None
            if not noted:
                note(f"cannot resolve --master-addr {address}, which is this machine; retrying")
            noted = True
        time.sleep(min(_NAME_RETRY_S, timeout_s))
