"""``ddplaunch run --hosts``: starts a job over SSH, with one command for each host."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from msgspec.structs import replace

from ddplaunch.base.errors import UsageError, host_name
from ddplaunch.base.options import Options, OptionSource
from ddplaunch.base.redaction import redacted_argv
from ddplaunch.base.safe_files import current_folder
from ddplaunch.base.text import join_names
from ddplaunch.base.tty import is_interactive
from ddplaunch.cli.cluster_detection import OVER_SSH_VARIABLE
from ddplaunch.cli.console_output import print_message, print_notes
from ddplaunch.cli.job_config_options import check_control_port
from ddplaunch.cli.show_option import merges_equal_lines
from ddplaunch.core.feature import ReplacementLauncher
from ddplaunch.core.options import (
    Connections,
    Elastic,
    Logging,
    Nodes,
    Output,
    Preemption,
    RanksPerNode,
    Stopping,
    TargetOptions,
)
from ddplaunch.core.output.log_message import LogMessage, MessageKind
from ddplaunch.features.code.archive import CodeArchive, check_log_dir, pack_folder
from ddplaunch.features.code.options import Code
from ddplaunch.features.ssh.fleet import Fleet, HostProblem
from ddplaunch.features.ssh.job_records import RECORDS, SshJob, record_end
from ddplaunch.features.ssh.options import SshHosts
from ddplaunch.features.ssh.remote_launcher import HostCode, HostJob
from ddplaunch.features.ssh.ssh_command import resolve_ssh_config, ssh_command
from ddplaunch.features.ssh.ssh_session import SshSession
from ddplaunch.system.clusters.host_spec import Host
from ddplaunch.system.clusters.host_spec import read_host_options as read_hosts
from ddplaunch.system.network.kernel_limits import raise_fd_limit_for_hosts
from ddplaunch.system.plan.launch_command import forwarded_variables
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.plan.rendezvous import DEFAULT_PORT, SOURCE_ASSUMED
from ddplaunch.system.processes.proc_utils import start_ticks
from ddplaunch.system.target.target import Target

_OMITTED_OPTIONS = {"nnodes", "node_rank", "master_addr", "master_port", "nproc", "gpus", "run_id", "no_config"}
"""Options that are not copied to the nodes: each node gets its own value, or has the option anyway."""
_NODE_0_OPTIONS = {"tensorboard", "sidecar", "notify"}


class SshLaunch(ReplacementLauncher):
    """A job that runs on the hosts of --hosts or --hostfile."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._hosts: tuple[Host, ...] = ()  # read by ``check``
        self._code: CodeArchive | None = None

    def check(self) -> None:
        options = self._options
        ssh, spares = options[SshHosts], options[Elastic].spares
        hosts = self._hosts = read_hosts(ssh.hosts, ssh.hostfile, ssh.include, ssh.exclude)
        for name, why in (
            ("nnodes", "each host is a node"),
            ("node_rank", "this command starts all nodes"),
            ("stdin", "the hosts cannot read this terminal"),
            ("ui", "the hosts cannot draw in this terminal"),
            ("cluster", "the job runs on the hosts"),
            ("grow", "the number of hosts is fixed"),
        ):
            if options.is_set(name):
                raise UsageError(f"--{name.replace('_', '-')} does not work with --hosts: {why}", "leave it out")
        if options[Connections].control == "none":
            raise UsageError("--control none does not work with --hosts: all nodes must end together", "leave it out")
        if spares and len(hosts) - spares < 2:
            left = max(0, len(hosts) - spares)
            what = f"--spares {spares} of {len(hosts)} hosts leaves {left} for the ranks"
            raise UsageError(what, "name at least two hosts more than spares: a spare cannot replace node 0")
        if options.is_set("nproc") and any(host.slots for host in hosts):
            what = f"--nproc {options[RanksPerNode].nproc} and the slots of the hosts contradict each other"
            raise UsageError(what, "give one")
        if options.is_set("gpus") and any(host.gpus for host in hosts):
            what = f"--gpus {options[RanksPerNode].gpus} and the chosen slots contradict each other"
            raise UsageError(what, "leave one of them out")
        if len(hosts) > 1 and hosts[0].name in ("localhost", "127.0.0.1", "::1") and options[Nodes].master_addr is None:
            what = f"{hosts[0].name} is another machine on each of the hosts"
            raise UsageError(what, "use the name by which the other hosts reach it, or add --master-addr")
        nnodes = len(hosts) - spares
        options.with_defaults(OptionSource.HOSTS, {"nnodes": (nnodes, nnodes)}).check_contradictions()
        if (folder := options[Code].code) is not None:
            self._code = pack_folder(folder)
            self._code.run_folder(current_folder())
            check_log_dir(options[Logging].log_dir)

    def run(self, target: Target, run_id: str) -> int:
        hosts, options, archive = self._hosts, self._options, self._code
        raise_fd_limit_for_hosts(len(hosts))
        environ = forwarded_environment(options[SshHosts].env, os.environ)
        offer = _offer_code(archive, target) if archive else None
        ssh_configs = [resolve_ssh_config(host.destination) for host in hosts]
        address = (options[Nodes].master_addr or ssh_configs[0].address) if len(hosts) > 1 else ""
        port = options[Nodes].master_port or DEFAULT_PORT
        control = options[Connections].control_port or port + 1
        if len(hosts) > 1:
            check_control_port(control, port)
        token = options[Nodes].token or os.urandom(16).hex()
        nonce = os.urandom(16).hex()
        python = options[SshHosts].remote_python or sys.executable
        heartbeat, preempt_signal = options[Connections].heartbeat_timeout, options[Preemption].preempt_signal
        may_merge = is_interactive(1) and is_interactive(2) and options[Output].merge is None
        merge = ("--merge",) if may_merge and merges_equal_lines(options) is None else ()  # the hosts have no terminal
        fleet = Fleet(
            heartbeat,
            options[Stopping].grace,
            options[Elastic].spares,
            allow_mismatch=options[Connections].allow_mismatch,
            preempt_signal=preempt_signal,
        )

        def connect(node: int, host: Host) -> Callable[..., SshSession]:
            nnodes = len(hosts) - options[Elastic].spares
            own = (*_node_argv(node, nnodes, address, options[Nodes].master_port), *_nproc_argv(host, options))
            common = options.to_argv(excluded=_OMITTED_OPTIONS | (_NODE_0_OPTIONS if node else set()))
            job = HostJob(
                nonce=nonce,
                environ={**environ, "DDPLAUNCH_TOKEN": token, OVER_SSH_VARIABLE: "1"},
                cwd=current_folder(),
                target=target.text,
                module=options[TargetOptions].module,
                no_python=options[TargetOptions].no_python,
                log_dir=options[Logging].log_dir,
                address=address,
                ports=(port, control) if node == 0 and len(hosts) > 1 else (),
                argv=("run", *own, "--no-config", "--run-id", run_id, *common, *merge, "--", target.text, *target.args),
                preempt_signal=preempt_signal,
                heartbeat=heartbeat,
                grace=options[Stopping].grace,
                code=offer,
            )
            command = ssh_command(host.destination, ssh_configs[node], python, environ, heartbeat)
            gateway, data = ssh_configs[node].first_hop, archive.data if archive else b""
            return lambda loop: SshSession(loop, host.name, gateway, command, job, data)

        pid = os.getpid()
        job = SshJob(
            run_id=run_id,
            hosts=tuple(host.destination for host in hosts),
            python=python,
            target=shlex.join([target.text, *target.args]),
            cwd=current_folder(),
            pid=pid,
            ticks=start_ticks(pid),
            host=host_name(),
            began=time.time(),
            argv=redacted_argv(),
        )
        RECORDS.save(job)
        code = None
        try:
            code = fleet.run([connect(node, host) for node, host in enumerate(hosts)])
        finally:
            record_end(job, None if fleet.problems else code, history=not options.value("no_history"))
        if fleet.problems:
            _print_problems(fleet.problems, len(hosts), code)
        return code

    def options_for_dry_run(self) -> tuple[Options, str]:
        """Return the options for these hosts, and a note on the node of each host."""
        hosts, options = self._hosts, self._options
        forwarded_environment(options[SshHosts].env, os.environ)
        new: dict[str, object] = {"cluster": "none", "nnodes": (len(hosts), len(hosts))}
        if len(hosts) > 1:
            new |= {"node_rank": 0, "master_addr": hosts[0].name}
        with_ranks = hosts[: len(hosts) - options[Elastic].spares]
        if any(host.slots for host in hosts):
            counts = [str(host.slots or 1) for host in with_ranks]
            new["nproc"] = counts[0] if len(set(counts)) == 1 else ",".join(counts)
        note = f"over SSH: {', '.join(f'node {node} is {host.name}' for node, host in enumerate(hosts))}"
        note += f"; code: {self._code}" if self._code else ""
        return options.with_defaults(OptionSource.HOSTS, new), f"{note}; each is assumed to be like this machine"

    def complete_plan(self, plan: Plan, options: Options) -> Plan:
        """Return the plan with the names of these hosts, marking what is only assumed about them."""
        hosts = self._hosts
        nodes = tuple(replace(node, host=host.name) for node, host in zip(plan.nodes, hosts, strict=False))
        ranks = tuple(replace(rank, host=nodes[rank.node_rank].host) for rank in plan.ranks)
        listed = "--hosts" if options[SshHosts].hosts else "--hostfile"
        sources = {"devices": SOURCE_ASSUMED, "threads per rank": SOURCE_ASSUMED}
        unknown = [host.name for host in hosts[: len(nodes)] if not host.slots]
        if not options.is_set("nproc"):
            sources["ranks per node"] = SOURCE_ASSUMED if unknown else listed
        if options.sources["master_addr"] is OptionSource.HOSTS:
            sources["master address"] = "the first host"
        facts = tuple(
            replace(fact, source=sources.get(fact.name, fact.source)) for fact in plan.facts if fact.name != "node rank"
        )
        notes = plan.notes
        if unknown and not (options.is_set("nproc") or options.is_set("gpus")):
            notes = (*notes, f"{join_names(unknown)}: one rank per GPU; their number is not known here")
        return replace(plan, nodes=nodes, ranks=ranks, facts=facts, notes=notes)


def _offer_code(archive: CodeArchive, target: Target) -> HostCode:
    """Print which code the hosts get; return its description. Raises UsageError if the target is not in the code."""
    archive.check_target(target.source or target.path, target.text)
    print_notes(f"code: {archive}", *archive.notes)
    version, below = archive.version, archive.run_folder(current_folder())
    return HostCode(version.sha, version.name, len(archive.data), below, version.to_variable())


def _print_problems(problems: list[HostProblem], hosts: int, code: int) -> None:
    bad = len({problem.host for problem in problems})
    width = max(len(problem.host) for problem in problems)
    text = f"{bad} of {hosts} hosts cannot run the job; nothing was started"
    lines = [f"ddplaunch: {text}", *(f"  {problem.host.ljust(width)}  {problem.text}" for problem in problems)]
    found = [{"host": problem.host, "text": problem.text} for problem in problems]
    print_message(
        LogMessage(MessageKind.ERROR, text, {"problems": found, "code": code}, "".join(f"{line}\n" for line in lines))
    )


def forwarded_environment(env_options: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the hosts, with those of ``--env``. Raises UsageError if one is invalid or not set."""
    variables = forwarded_variables(environ)
    for text in env_options:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--env {name[:60]!r} is not the name of a variable", "--env NAME, or --env NAME=VALUE")
        if not equals and name not in environ:
            raise UsageError(f"--env {name}: the variable is not set here", f"--env {name}=VALUE")
        variables[name] = value if equals else environ[name]
    return variables


def _node_argv(node: int, nnodes: int, address: str, port: int | None) -> Iterator[str]:
    yield from ("--nnodes", str(nnodes))
    if nnodes > 1:
        yield from ("--node-rank", str(node), "--master-addr", address)
    if port is not None:
        yield from ("--master-port", str(port))


def _nproc_argv(host: Host, options: Options) -> Iterator[str]:
    """Options for a host's ranks: its slots, or what the user has set for all hosts."""
    if host.gpus is not None:
        yield from ("--gpus", ",".join(map(str, host.gpus)))
    elif (gpus := options[RanksPerNode].gpus) is not None:
        yield from ("--gpus", gpus)
    if host.gpus is None and (host.slots or options[RanksPerNode].nproc):
        yield from ("--nproc", str(host.slots or options[RanksPerNode].nproc))
