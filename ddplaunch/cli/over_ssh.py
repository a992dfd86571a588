"""``ddplaunch run --hosts``: from what was typed to one command for each host."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from ddplaunch.cli.options import as_typed
from ddplaunch.errors import UsageError, shown

if TYPE_CHECKING:
    from ddplaunch.ssh.hosts import Host
    from ddplaunch.target.target import Target

CARRIED = ("LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS")
CARRIED_BEGINNINGS = ("NCCL_", "GLOO_", "TORCH_")
"""The variables that go along unasked."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")

STARTED = "DDPLAUNCH_OVER_SSH"
"""The variable by which a launcher knows that the others are started at the same time."""

PATIENCE = 1e6
"""Seconds, beyond any wait: a launcher's output is read by us, who do so slowly on purpose, or are seen to be gone."""

OWN_OPTIONS = ("hosts", "hostfile", "include", "exclude", "env", "remote_python")
_PER_NODE = {"nnodes", "node_rank", "master_addr", "master_port", "nproc", "gpus", "run_id", "token", "dry_run"}
_OF_NODE_0 = {"tensorboard", "sidecar"}
_NOT_REPEATED = {*OWN_OPTIONS, *_PER_NODE, "as_json"}


def read(flags: dict[str, Any]) -> tuple[Host, ...]:
    """Return the hosts that were typed; none where nothing was.

    Raises:
        UsageError: they make no sense, or contradict what else was typed.
    """
    typed = _typed()
    if not typed & {"hosts", "hostfile"}:
        for name in OWN_OPTIONS:
            if name in typed:
                raise UsageError(f"--{name.replace('_', '-')} goes with --hosts or --hostfile", "--hosts n1:4,n2:4")
        return ()
    from ddplaunch.ssh.hosts import choose, read_hostfile, read_hosts

    if {"hosts", "hostfile"} <= typed:
        both = f"--hosts {shown(flags['hosts'], 100)} and --hostfile {shown(flags['hostfile'], 100)}"
        raise UsageError(f"{both} contradict each other", "leave one of them out")
    for name, why in (
        ("nnodes", "there are as many nodes as hosts"),
        ("node_rank", "this command starts all nodes"),
        ("stdin", "stdin of the hosts is ours"),
        ("cluster", "the hosts say where the job runs"),
    ):
        if name in typed:
            raise UsageError(f"--{name.replace('_', '-')} and --hosts contradict each other: {why}", "leave it out")
    if flags["control"] == "none":
        raise UsageError("--control none and --hosts contradict each other: nodes have to end together", "leave it out")
    hosts = read_hostfile(flags["hostfile"]) if "hostfile" in typed else read_hosts(flags["hosts"])
    hosts = choose(hosts, flags["include"], flags["exclude"])
    if "nproc" in typed and any(host.slots for host in hosts):
        raise UsageError(f"--nproc {flags['nproc']} and the slots of the hosts contradict each other", "give one")
    if "gpus" in typed and any(host.gpus for host in hosts):
        raise UsageError(f"--gpus {flags['gpus']} and the slots chosen contradict each other", "give one of them")
    if len(hosts) > 1 and hosts[0].name in LOOPBACK and flags["master_addr"] is None:
        raise UsageError(
            f"{hosts[0].name} is another machine for each of the hosts",
            "name it as the others reach it, or add --master-addr",
        )
    return hosts


def start(hosts: tuple[Host, ...], flags: dict[str, Any], target: Target, run_id: str) -> int:
    """Run the job on the hosts; return its exit code."""
    from ddplaunch.plan.rendezvous import DEFAULT_PORT
    from ddplaunch.ssh.client import Connection, command, look_up
    from ddplaunch.ssh.fleet import Fleet, make_room

    make_room(len(hosts))
    environ = carried(flags["env"], os.environ)
    ways = [look_up(host.destination) for host in hosts]
    address = (flags["master_addr"] or ways[0].address) if len(hosts) > 1 else ""
    port = flags["master_port"] or DEFAULT_PORT
    control = flags["control_port"] or port + 1
    if len(hosts) > 1 and control > 65535:
        raise UsageError(f"--master-port {port} leaves no port for the control", "give a --control-port")
    token = flags["token"] or os.urandom(16).hex()
    nonce = os.urandom(16).hex()
    python = flags["remote_python"] or sys.executable
    heartbeat, grace = flags["heartbeat_timeout"], flags["grace"]
    warning = flags["preempt_signal"]
    fleet = Fleet(heartbeat, grace, allow_mismatch=flags["allow_mismatch"], warning=warning)

    def connect(node: int, host: Host) -> Callable[..., Connection]:
        words = [
            *_place(node, len(hosts), address, flags["master_port"]),
            *_share(host, flags),
            "--run-id",
            run_id,
        ]
        settings = {
            "nonce": nonce,
            "environ": {**environ, "DDPLAUNCH_TOKEN": token, STARTED: "1"},
            "cwd": os.getcwd(),
            "target": {"typed": target.typed, "module": flags["module"], "no_python": flags["no_python"]},
            "log_dir": flags["log_dir"],
            "address": address,
            "ports": [port, control] if node == 0 and len(hosts) > 1 else [],
            "words": ["run", *words, *_repeated(node), "--", target.typed, *target.args],
            "warning": warning,
            "heartbeat": heartbeat,
            "grace": grace,
        }
        reach = command(host.destination, ways[node], python, environ, heartbeat)
        return lambda loop: Connection(loop, host.name, ways[node].first, reach, settings)

    code = fleet.run([connect(node, host) for node, host in enumerate(hosts)])
    if fleet.problems:
        bad = len({problem.host for problem in fleet.problems})
        click.echo(f"ddplaunch: {bad} of {len(hosts)} hosts cannot take part, and nothing was started", err=True)
        width = max(len(problem.host) for problem in fleet.problems)
        for problem in fleet.problems:
            click.echo(f"  {problem.host.ljust(width)}  {problem.text}", err=True)
    return code


def describe(hosts: tuple[Host, ...], flags: dict[str, Any]) -> str:
    """Let a dry run plan for these hosts; return a note on which node is which."""
    carried(flags["env"], os.environ)
    flags["nnodes"], flags["node_rank"], flags["cluster"] = (len(hosts),) * 2, 0 if len(hosts) > 1 else None, "none"
    if all(host.slots for host in hosts):
        flags["nproc"] = ",".join(str(host.slots) for host in hosts)
    if len(hosts) > 1:
        flags["master_addr"] = flags["master_addr"] or hosts[0].name
    shown = ", ".join(f"node {node} is {host.name}" for node, host in enumerate(hosts))
    return f"over SSH: {shown}"


def carried(asked: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that go along: some unasked, and what ``--env`` names.

    Raises:
        UsageError: ``--env`` names none, or one that is not set.
    """
    found = {name: value for name, value in environ.items() if name in CARRIED or name.startswith(CARRIED_BEGINNINGS)}
    for text in asked:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--env {name[:60]!r} is no variable's name", "--env NAME, or --env NAME=VALUE")
        if not equals and name not in environ:
            raise UsageError(f"--env {name}: there is no such variable here", f"--env {name}=VALUE")
        found[name] = value if equals else environ[name]
    return found


def _typed() -> set[str]:
    context = click.get_current_context()
    return {
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    }


def _place(node: int, nnodes: int, address: str, port: int | None) -> Iterator[str]:
    yield from ("--nnodes", str(nnodes))
    if nnodes > 1:
        yield from ("--node-rank", str(node), "--master-addr", address)
    if port is not None:
        yield from ("--master-port", str(port))


def _share(host: Host, flags: dict[str, Any]) -> Iterator[str]:
    """A host's ranks: its slots, or what was typed for all."""
    if host.gpus is not None:
        yield from ("--gpus", ",".join(map(str, host.gpus)))
    elif flags["gpus"] is not None:
        yield from ("--gpus", flags["gpus"])
    if host.gpus is None and (host.slots or flags["nproc"]):
        yield from ("--nproc", str(host.slots or flags["nproc"]))


def _repeated(node: int) -> Iterator[str]:
    """The other options typed, as they were."""
    context = click.get_current_context()
    typed = _typed() - _NOT_REPEATED - (_OF_NODE_0 if node else set())
    for param in context.command.params:
        if isinstance(param, click.Option) and param.name in typed:
            yield from as_typed(param, context.params[param.name or ""])
