"""The rules of the job as a whole, from the options: how its nodes join, stay in contact, restart and stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.cli.surroundings import one_log
from ddplaunch.cli.values import AUTO
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from ddplaunch.cli.options import Options
    from ddplaunch.clusters.finding import Finding
    from ddplaunch.control.rules import Rules


def check_nodes(options: Options) -> None:
    """Refuse options that contradict each other on the nodes."""
    lowest, highest = options.nnodes
    if options.grow and lowest == highest:
        raise UsageError(f"--grow does not work with --nnodes {highest}", f"--nnodes {highest}:{highest + 1}")
    if options.control == "none" and lowest != highest:
        raise UsageError(f"--nnodes {lowest}:{highest} does not work with --control none", "leave --control none out")
    if options.control == "none" and options.node_rank == AUTO:
        raise UsageError("--node-rank auto does not work with --control none", "leave --control none out")


def check_control_port(port: int, master_port: int) -> None:
    """Refuse a control port that there is not; it is the one behind the master port where no option names it."""
    if port > 65535:
        raise UsageError(f"--master-port {master_port} leaves no control port behind it", "add --control-port PORT")


def read_rules(options: Options, address: str, master_port: int, finding: Finding | None) -> Rules:
    """Return the rules of a job whose node 0 is at this address; refuse one without a control port."""
    from ddplaunch.control.rules import Rules

    lowest, highest = options.nnodes
    port = None
    if highest == 1 or options.control == "none":
        lowest, highest, address = 1, 1, ""
    else:
        port = options.control_port or master_port + 1
        check_control_port(port, master_port)
        if port == master_port:
            raise UsageError(f"--control-port {port} is the master port", "leave --control-port out, or give another")
    return Rules(
        min_nodes=lowest,
        max_nodes=highest,
        run_id=options.run_id,
        token=options.token,
        address=address,
        # a typed address is known, or wrong
        address_comes_late=bool(finding and finding.address_comes_late) and not options.is_set("master_addr"),
        port=port,
        interface=options.interface,
        join_timeout=options.join_timeout,
        join_window=options.join_window,
        heartbeat_timeout=options.heartbeat_timeout,
        grace=options.grace,
        preempt_grace=options.preempt_grace,
        max_restarts=options.max_restarts,
        restart_backoff=options.restart_backoff,
        min_uptime=options.min_uptime,
        max_membership_changes=options.max_membership_changes,
        grow=options.grow,
        allow_mismatch=options.allow_mismatch,
        inspect=not options.no_inspect,
        one_log=one_log(finding),
    )
