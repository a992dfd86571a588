"""``ddplaunch doctor``: the command that checks one or many machines for problems that break or slow a job."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click
from click.core import ParameterSource
from msgspec import Struct

from ddplaunch.base.errors import UsageError, escape_control_chars, host_name
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.text import join_names
from ddplaunch.base.types import WEEK_S
from ddplaunch.cli.console_output import print_note
from ddplaunch.cli.host_connector import NodeCommand
from ddplaunch.cli.lookup.remote_jobs import find_host_connector
from ddplaunch.core.option_values import make_number_parser, parse_seconds
from ddplaunch.features.doctor import baseline, manual_rendezvous
from ddplaunch.features.doctor.baseline import Baseline
from ddplaunch.features.doctor.bisect_command import bisect
from ddplaunch.features.doctor.checks import Severity
from ddplaunch.features.doctor.examination import Examiner
from ddplaunch.features.doctor.findings import find_all
from ddplaunch.features.doctor.node_process import NODE_STATEMENT
from ddplaunch.features.doctor.peers import EXIT_TIMEOUT_S, CommandPeer, DoctorPeer
from ddplaunch.features.doctor.report import format_report, to_json
from ddplaunch.features.doctor.thorough_examiner import ThoroughExaminer
from ddplaunch.system.clusters.host_spec import read_host_options
from ddplaunch.system.clusters.systems import slurm_env
from ddplaunch.system.network.addresses import check_local_address
from ddplaunch.system.network.kernel_limits import raise_fd_limit_for_hosts
from ddplaunch.system.plan.launch_command import forwarded_variables, python_command
from ddplaunch.system.plan.rendezvous import locate_store

HEARTBEAT_TIMEOUT_S = 60.0  # without data for this long a host counts as lost
_read_timeout = make_number_parser(parse_seconds, 0, WEEK_S, "a time from 0 up to a week, like 90 (seconds) or 10m")


@click.group(invoke_without_command=True, subcommand_metavar="[bisect]")
@click.option("--hosts", metavar="HOSTS", help="Check these hosts over SSH: n1,n2 or n[1-4].")
@click.option("--hostfile", metavar="FILE", help="Check the hosts in this file, one per line.")
@click.option("--include", metavar="HOSTS", help="Check only these of the hosts.")
@click.option("--exclude", metavar="HOSTS", help="Skip these hosts.")
@click.option(
    "--remote-python", metavar="PATH", help="Path of Python on the hosts.  [default: the path of this Python]"
)
@click.option("--nnodes", type=click.IntRange(1), metavar="N", help="Number of nodes. Run the same command on each.")
@click.option("--node-rank", type=click.IntRange(0), metavar="I", help="Rank of this node. Node 0 prints the report.")
@click.option("--master-addr", metavar="ADDRESS", help="Address of node 0.")
@click.option(
    "--master-port",
    type=click.IntRange(1, 65534),
    default=29500,
    show_default=True,
    metavar="PORT",
    help="Test this port, the next one and a random one.",
)
@click.option(
    "--join-timeout",
    metavar="TIME",
    default="60",
    show_default=True,
    callback=lambda ctx, param, text: _read_timeout(param, text),
    help="How long to wait for the other nodes.",
)
@click.option("--thorough", is_flag=True, help="Measure more, and all nodes at once.")
@click.option("--save", metavar="FILE", help="Save the measurements to this file.")
@click.option("--compare", metavar="FILE", help="List what is slower than in a file from --save.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with stable field names.")
@click.pass_context
def doctor(
    ctx: click.Context,
    hosts: str | None,
    hostfile: str | None,
    include: str | None,
    exclude: str | None,
    remote_python: str | None,
    nnodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int,
    join_timeout: float,
    thorough: bool,
    save: str | None,
    compare: str | None,
    as_json: bool,
) -> int:
    """Check one or many machines for problems that break or slow jobs.

    Checks versions, GPUs, shared memory, disks, limits, clocks and the connectivity between nodes, and measures a
    small all_reduce. Changes nothing and takes half a minute. The exit code is 1 if a job would fail.
    """
    if ctx.invoked_subcommand is not None:
        _reject_options_before_bisect(ctx)
        return 0
    hosts_option = "--hosts" if hosts is not None else "--hostfile" if hostfile is not None else None
    manual = _parse_manual_nodes(nnodes, node_rank, master_addr, hosts_option)
    if manual and manual[1]:  # only node 0 prints the report
        save = compare = None
    if save is not None:
        baseline.check_writable(save)
    options = DoctorOptions(thorough, as_json, save, baseline.read_baseline(compare) if compare is not None else None)
    environ = forwarded_variables(os.environ)  # in Slurm too: SLURM_EXPORT_ENV may exclude them
    loop = EventLoop()
    if hosts is None and hostfile is None:
        for name, value in (("include", include), ("exclude", exclude), ("remote-python", remote_python)):
            if value is not None:
                raise UsageError(f"--{name} works only with --hosts or --hostfile", "--hosts n1,n2")
        if manual:
            return _run_manual_node(loop, *manual, master_port, join_timeout, options)
        commands = _local_command() if nnodes else _slurm_commands() or _local_command()
    else:
        connector = find_host_connector(hosts_option or "--hosts")
        all_hosts, python = read_host_options(hosts, hostfile, include, exclude), remote_python or sys.executable
        commands = connector.python_commands(all_hosts, python, NODE_STATEMENT, HEARTBEAT_TIMEOUT_S)
    if master_addr is not None and len(commands) < 2:
        raise UsageError("--master-addr works only with several nodes", "--hosts n1,n2")
    raise_fd_limit_for_hosts(len(commands))
    with _closing_peers() as peers:
        peers += [CommandPeer(loop, each) for each in commands]
        return _examine(loop, peers, master_addr or commands[0].address, master_port, environ, options)


doctor.add_command(bisect)


def _reject_options_before_bisect(ctx: click.Context) -> None:
    """Raise UsageError for an option of ``doctor`` before ``bisect``, which has its own options."""
    for option in ctx.command.params:
        if option.name and ctx.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            hint = "ddplaunch doctor bisect --hosts n1,n2 -- COMMAND"
            raise UsageError(f"{option.opts[0]} must come after bisect", hint)


def _parse_manual_nodes(
    nnodes: int | None, node_rank: int | None, master_addr: str | None, hosts: str | None
) -> tuple[int, int, str] | None:
    """Return the number of nodes, the rank of this one and node 0's address; None unless several are started by hand.

    ``hosts``: the option that lists hosts, if one is given.
    """
    if nnodes is None and node_rank is None:
        return None
    if nnodes is None:
        raise UsageError(f"--node-rank {node_rank} requires --nnodes", "add the number of nodes: --nnodes 2")
    if hosts:
        what = f"--nnodes {nnodes} does not work with {hosts}, which sets the number"
        raise UsageError(what, "leave one of them out")
    example = f"on node 0: --nnodes {nnodes} --node-rank 0 --master-addr {master_addr or '10.0.0.1'}"
    if nnodes > 1 and node_rank is None:
        raise UsageError(f"--nnodes {nnodes} requires --node-rank", example)
    if nnodes > 1 and master_addr is None:
        raise UsageError(f"--nnodes {nnodes} requires --master-addr", example)
    if node_rank is not None and node_rank >= nnodes:
        numbered = "the one node is 0" if nnodes == 1 else f"{nnodes} nodes are numbered 0 to {nnodes - 1}"
        hint = f"--nnodes {node_rank + 1} or more, if that was the intention"
        raise UsageError(f"--node-rank {node_rank} is out of range: {numbered}", hint)
    if nnodes == 1 or node_rank is None:
        return None
    return nnodes, node_rank, locate_store(master_addr, None, None, nnodes=nnodes, here=None, environ={})[0].value


@contextmanager
def _closing_peers() -> Iterator[list[DoctorPeer]]:
    """Context manager that yields a list for peers; at the end it closes the peers, and kills processes that stay."""
    peers: list[DoctorPeer] = []
    try:
        yield peers
    finally:
        for peer in peers:
            peer.close()
        until = time.monotonic() + EXIT_TIMEOUT_S
        for peer in peers:
            peer.wait_for_exit(until)


class DoctorOptions(Struct, frozen=True):
    """The options of ``ddplaunch doctor``: which tests to run, and what to do with the results."""

    thorough: bool
    as_json: bool
    save: str | None  # the path of a file
    before: Baseline | None  # the file of --compare


def _examine(
    loop: EventLoop,
    peers: Sequence[DoctorPeer],
    address: str,
    port: int,
    environ: dict[str, str],
    options: DoctorOptions,
) -> int:
    """Examine these nodes, print the report and return the exit code; ``address`` and ``port`` are node 0's."""
    began = time.monotonic()
    several = len(peers) > 1
    ports = (port, port + 1) if several else ()
    examiner = ThoroughExaminer if options.thorough else Examiner
    results = examiner(loop, peers, address if several else "", ports, environ, print_note).examine()
    findings = find_all(results, baseline.find_slower_than_baseline(results, options.before) if options.before else ())
    if options.save is not None:
        baseline.save_baseline(results, options.save)
    if options.as_json:
        click.echo(json.dumps(to_json(results, findings), indent=2))
    else:
        click.echo(escape_control_chars(format_report(results, findings, time.monotonic() - began)), nl=False)
    code = int(any(each.severity is Severity.ERROR for each in findings))
    for peer in peers:
        peer.send_exit(code)
    return code


def _run_manual_node(
    loop: EventLoop, nnodes: int, node_rank: int, address: str, port: int, join_timeout: float, options: DoctorOptions
) -> int:
    """Run on one of several nodes that the user starts by hand: node 0 examines all nodes, the others reply to it."""
    token = os.environ.get("DDPLAUNCH_TOKEN")
    if node_rank:
        return manual_rendezvous.join(address, port + 1, node_rank, nnodes, token, join_timeout, print_note)
    check_local_address(address)
    raise_fd_limit_for_hosts(nnodes)
    shared_options = f"--master-addr {address} --master-port {port}"
    with _closing_peers() as peers:
        peers += [CommandPeer(loop, command) for command in _local_command()]
        gathering = manual_rendezvous.ManualRendezvous(loop, port + 1, nnodes, token)
        missing = join_names(map(str, gathering.missing_nodes))
        print_note(f"waiting for node {missing} on port {port + 1} (up to {join_timeout:g} s)")
        peers += gathering.wait_for_nodes(
            join_timeout, lambda rank: f"ddplaunch doctor --nnodes {nnodes} --node-rank {rank} {shared_options}"
        )
        return _examine(loop, peers, address, port, {}, options)


def _local_command() -> list[NodeCommand]:
    return [NodeCommand(host_name(), "", python_command(sys.executable, NODE_STATEMENT))]


def _slurm_commands() -> list[NodeCommand]:
    """Return the commands for the nodes of the surrounding Slurm job, a step each; none outside of a job."""
    allocation = slurm_env.allocation(os.environ)
    if allocation is None or len(allocation.hosts) < 2:
        return []
    step = os.environ.get(slurm_env.STEP_ID, "")
    if step.isdigit() and int(step) < slurm_env.FIRST_SPECIAL_STEP:
        raise UsageError(
            "ddplaunch doctor starts a step on each node itself, but it already runs in a step (srun)",
            "run it without srun, in the batch script or in the shell that salloc opens",
        )
    words = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--quiet")
    python = python_command(sys.executable, NODE_STATEMENT)
    return [
        NodeCommand(host, host, (*words, f"--nodelist={host}", *python), f"srun --overlap --nodelist={host} true")
        for host in allocation.hosts
    ]
