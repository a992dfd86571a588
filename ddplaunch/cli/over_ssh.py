"""``ddplaunch run --hosts``: from what was typed to one command for each host."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from ddplaunch import TYPE_CHECKING
from ddplaunch.cli.options import OF_SSH, Options, Source
from ddplaunch.cli.rules import check_control_port
from ddplaunch.cli.say import say
from ddplaunch.cli.show import read_merge
from ddplaunch.cli.surroundings import OVER_SSH
from ddplaunch.dataclass import replace
from ddplaunch.errors import UsageError, host_name
from ddplaunch.job.over_ssh import SshJob, kept
from ddplaunch.output.terminal import watched
from ddplaunch.output.voice import Said, Topic
from ddplaunch.plan.plan import Plan
from ddplaunch.plan.rendezvous import ASSUMED, DEFAULT_PORT
from ddplaunch.rank.processes import start_ticks
from ddplaunch.ssh.client import Session, command, look_up
from ddplaunch.ssh.fleet import Fleet, Problem, make_room
from ddplaunch.ssh.hosts import Host
from ddplaunch.ssh.hosts import read as read_hosts
from ddplaunch.ssh.remote import HostJob
from ddplaunch.target.target import Target
from ddplaunch.words import named, quoted

if TYPE_CHECKING:
    from ddplaunch.cli.options import Inferred

CARRIED = ("LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS")
CARRIED_BEGINNINGS = ("NCCL_", "GLOO_", "TORCH_")
"""The variables that go along unasked."""

_PER_NODE = {"nnodes", "node_rank", "master_addr", "master_port", "nproc", "gpus", "run_id", "token", "dry_run"}
_OF_NODE_0 = {"tensorboard", "sidecar", "notify"}
_NOT_REPEATED = {*OF_SSH, *_PER_NODE, "no_config", "as_json"}


def read(options: Options) -> tuple[Host, ...]:
    """Return the hosts that the user has named; refuse those that make no sense, or contradict other options."""
    hosts = read_hosts(options.hosts, options.hostfile, options.include, options.exclude)
    for name, why in (
        ("nnodes", "each host is a node"),
        ("node_rank", "this command starts all nodes"),
        ("stdin", "the hosts cannot read this terminal"),
        ("ui", "the hosts cannot draw in this terminal"),
        ("cluster", "the job runs on the hosts"),
    ):
        if options.is_set(name):
            raise UsageError(f"--{name.replace('_', '-')} does not work with --hosts: {why}", "leave it out")
    if options.control == "none":
        raise UsageError("--control none does not work with --hosts: all nodes must end together", "leave it out")
    if options.spares and len(hosts) - options.spares < 2:
        left = max(0, len(hosts) - options.spares)
        what = f"--spares {options.spares} of {len(hosts)} hosts leaves {left} for the ranks"
        raise UsageError(what, "name two hosts more than spares: node 0 keeps its place")
    if options.is_set("nproc") and any(host.slots for host in hosts):
        raise UsageError(f"--nproc {options.nproc} and the slots of the hosts contradict each other", "give one")
    if options.is_set("gpus") and any(host.gpus for host in hosts):
        raise UsageError(f"--gpus {options.gpus} and the slots chosen contradict each other", "give one of them")
    if len(hosts) > 1 and hosts[0].name in ("localhost", "127.0.0.1", "::1") and options.master_addr is None:
        what = f"{hosts[0].name} is another machine on each of the hosts"
        raise UsageError(what, "name it as the others reach it, or add --master-addr")
    return hosts


def start(hosts: tuple[Host, ...], options: Options, target: Target, run_id: str) -> int:
    """Run the job on the hosts; return its exit code."""
    make_room(len(hosts))
    environ = carried(options.env, os.environ)
    ways = [look_up(host.destination) for host in hosts]
    address = (options.master_addr or ways[0].address) if len(hosts) > 1 else ""
    port = options.master_port or DEFAULT_PORT
    control = options.control_port or port + 1
    if len(hosts) > 1:
        check_control_port(control, port)
    token = options.token or os.urandom(16).hex()
    nonce = os.urandom(16).hex()
    python = options.remote_python or sys.executable
    heartbeat, warning = options.heartbeat_timeout, options.preempt_signal
    looked_at = watched(1) and watched(2) and options.merge is None
    merge = ("--merge",) if looked_at and read_merge(options) is None else ()  # the hosts have no terminal
    fleet = Fleet(heartbeat, options.grace, options.spares, allow_mismatch=options.allow_mismatch, warning=warning)

    def connect(node: int, host: Host) -> Callable[..., Session]:
        nnodes = len(hosts) - options.spares
        own = (*_node_words(node, nnodes, address, options.master_port), *_rank_words(host, options))
        alike = options.words(without=_NOT_REPEATED | (_OF_NODE_0 if node else set()))
        job = HostJob(
            nonce=nonce,
            environ={**environ, "DDPLAUNCH_TOKEN": token, OVER_SSH: "1"},
            cwd=os.getcwd(),
            target=target.typed,
            module=options.module,
            no_python=options.no_python,
            log_dir=options.log_dir,
            address=address,
            ports=(port, control) if node == 0 and len(hosts) > 1 else (),
            words=("run", *own, "--no-config", "--run-id", run_id, *alike, *merge, "--", target.typed, *target.args),
            warning=warning,
            heartbeat=heartbeat,
            grace=options.grace,
        )
        reach = command(host.destination, ways[node], python, environ, heartbeat)
        return lambda loop: Session(loop, host.name, ways[node].first, reach, job)

    me = os.getpid()
    job = SshJob(
        run_id=run_id,
        hosts=tuple(host.destination for host in hosts),
        python=python,
        target=quoted([target.typed, *target.args]),
        cwd=os.getcwd(),
        pid=me,
        ticks=start_ticks(me),
        host=host_name(),
        began=time.time(),
    )
    with kept(job, history=not options.no_history) as end:
        code = fleet.run([connect(node, host) for node, host in enumerate(hosts)])
        end.code = None if fleet.problems else code
    if fleet.problems:
        _say_problems(fleet.problems, len(hosts), code)
    return code


def _say_problems(problems: list[Problem], hosts: int, code: int) -> None:
    bad = len({problem.host for problem in problems})
    width = max(len(problem.host) for problem in problems)
    text = f"{bad} of {hosts} hosts cannot take part, and nothing was started"
    lines = [f"ddplaunch: {text}", *(f"  {problem.host.ljust(width)}  {problem.text}" for problem in problems)]
    found = [{"host": problem.host, "text": problem.text} for problem in problems]
    say(Said(Topic.ERROR, text, {"problems": found, "code": code}, "".join(f"{line}\n" for line in lines)))


def planned(hosts: tuple[Host, ...], options: Options) -> tuple[Options, str]:
    """Return the options of a dry run for these hosts, and a note on which node is which."""
    carried(options.env, os.environ)
    new: Inferred = {"cluster": "none", "nnodes": (len(hosts), len(hosts))}
    if len(hosts) > 1:
        new |= {"node_rank": 0, "master_addr": hosts[0].name}
    with_ranks = hosts[: len(hosts) - options.spares]
    if any(host.slots for host in hosts):
        counts = [str(host.slots or 1) for host in with_ranks]
        new["nproc"] = counts[0] if len(set(counts)) == 1 else ",".join(counts)
    which = f"over SSH: {', '.join(f'node {node} is {host.name}' for node, host in enumerate(hosts))}"
    return options.filled(Source.HOSTS, new), f"{which}; each is assumed to be like this machine"


def on_hosts(plan: Plan, hosts: tuple[Host, ...], options: Options) -> Plan:
    """The plan of a dry run with the names of these hosts, and with what is known of them and what is assumed."""
    nodes = tuple(replace(node, host=host.name) for node, host in zip(plan.nodes, hosts, strict=False))
    ranks = tuple(replace(rank, host=nodes[rank.node_rank].host) for rank in plan.ranks)
    listed = "--hosts" if options.hosts else "--hostfile"
    sources = {"devices": ASSUMED, "threads per rank": ASSUMED}
    unknown = [host.name for host in hosts[: len(nodes)] if not host.slots]
    if not options.is_set("nproc"):
        sources["processes per node"] = ASSUMED if unknown else listed
    if options.sources["master_addr"] is Source.HOSTS:
        sources["master address"] = "the first host"
    facts = tuple(
        replace(fact, source=sources.get(fact.name, fact.source)) for fact in plan.facts if fact.name != "node rank"
    )
    notes = plan.notes
    if unknown and not (options.is_set("nproc") or options.is_set("gpus")):
        notes = (*notes, f"{named(unknown)}: one rank for each GPU; how many there are is not known here")
    return replace(plan, nodes=nodes, ranks=ranks, facts=facts, notes=notes)


def carried(asked: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that go along: some unasked, and what ``--env`` names; refuse names that are none, or not set."""
    variables = {
        name: value for name, value in environ.items() if name in CARRIED or name.startswith(CARRIED_BEGINNINGS)
    }
    for text in asked:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--env {name[:60]!r} is not the name of a variable", "--env NAME, or --env NAME=VALUE")
        if not equals and name not in environ:
            raise UsageError(f"--env {name}: the variable is not set here", f"--env {name}=VALUE")
        variables[name] = value if equals else environ[name]
    return variables


def _node_words(node: int, nnodes: int, address: str, port: int | None) -> Iterator[str]:
    yield from ("--nnodes", str(nnodes))
    if nnodes > 1:
        yield from ("--node-rank", str(node), "--master-addr", address)
    if port is not None:
        yield from ("--master-port", str(port))


def _rank_words(host: Host, options: Options) -> Iterator[str]:
    """A host's ranks: its slots, or what the user has set for all."""
    if host.gpus is not None:
        yield from ("--gpus", ",".join(map(str, host.gpus)))
    elif options.gpus is not None:
        yield from ("--gpus", options.gpus)
    if host.gpus is None and (host.slots or options.nproc):
        yield from ("--nproc", str(host.slots or options.nproc))
