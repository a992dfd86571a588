"""``ddplaunch debug``: attaches the terminal to the debuggers of a running job's ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

import click
import psutil
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError, host_name, sanitize_line
from ddplaunch.cli import client, launcher_command
from ddplaunch.cli.client import REPLY_TIMEOUT_S, JobNotResponding
from ddplaunch.cli.cluster_detection import OVER_SSH_VARIABLE
from ddplaunch.cli.lookup.batch_jobs import RunningBatchJob, find_running_batch_job
from ddplaunch.cli.lookup.job_command import JobCommand, RunName
from ddplaunch.cli.lookup.remote_jobs import find_host_connector
from ddplaunch.cli.lookup.run_index import find_running
from ddplaunch.core.control_socket.status_request import StatusQuery
from ddplaunch.features.debug.client import DebugClient
from ddplaunch.observe.diagnosis.inspection import Detail
from ddplaunch.observe.request import InspectJobRequest
from ddplaunch.system.clusters.host_spec import parse_hosts
from ddplaunch.system.schedulers.job_step import StepNotStarted, query_node_zero
from ddplaunch.system.schedulers.scheduler import run_program
from ddplaunch.system.schedulers.scheduler_registry import get_scheduler

HOST_QUERY_TIMEOUT_S = 30.0  # for `stacks --json` on a host of --hosts


@click.command(cls=JobCommand)
@click.argument("run", metavar="[RUN]", required=False, type=RunName(running=True))
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Pause this rank at its next line of Python.")
@click.option(
    "--hosts",
    metavar="HOSTS",
    help="Connect over SSH to this host, or to the one of several that runs the rank.",
)
def debug(run: str | None, rank: int | None, hosts: str | None) -> int:
    """Attach to the debugger of the ranks of a run.

    RUN is the name in `ddplaunch ps`, a part of it, or the PID of the launcher. Default: the only run in progress.

    Ranks stop at `breakpoint()` if `ddplaunch run` was started in a terminal, or with --debug. Type pdb commands; @3
    selects rank 3, `@all p loss` asks all stopped ranks. `detach`, Ctrl-D or Ctrl-C resume the ranks, `q` ends the
    job.

    With the number of a job submitted to Slurm, its nodes are reached by `srun --overlap`, and the pods of one of
    Kubernetes by `kubectl exec`. Ranks of other nodes are
    reached over SSH if the job runs over SSH or --hosts is given, otherwise by srun within a Slurm job.
    """
    more = [] if rank is None else ["--rank", str(rank)]
    if hosts is not None:
        return _run_on_host(_choose_host(hosts, run, rank), ["debug", *([run] if run else []), *more], "--hosts")
    if batch_job := find_running_batch_job(run, "debug"):
        if rank is not None:
            words = ["stacks", batch_job.run, "--json"]
            output = query_node_zero(batch_job.job, batch_job.state, words, REPLY_TIMEOUT_S)
            host = _host_from_stacks(output, rank) or batch_job.state.host
            batch_job = batch_job._replace(state=replace(batch_job.state, host=host))
        return _run_in_job_step(batch_job, ["debug", batch_job.run, *more])
    job = find_running(run)
    if rank is not None and (host := _host_of_rank(job.path, rank)):
        environ: dict[str, str] = {}
        with suppress(psutil.Error):
            environ = psutil.Process(job.pid).environ()
        words = ["debug", job.run_id, *more]
        if OVER_SSH_VARIABLE in environ:
            return _run_on_host(host, words, f"rank {rank} on {host}")
        if number := environ.get("SLURM_JOB_ID"):
            stdin = "--pty" if os.isatty(0) else "--input=all"
            where = [f"--jobid={number}", "--nodes=1", "--ntasks=1", f"--nodelist={host}", stdin]
            return _exec_command(["srun", "--overlap", *where, *launcher_command(sys.executable), *words])
    return DebugClient(job.path, rank).run()


def _host_of_rank(path: str, rank: int) -> str:
    """Return the host of a rank of another node; "" if the rank is on this node, or its host is unknown."""
    status = client.send_request(path, StatusQuery())
    if rank in {each.rank for each in status.ranks} or rank >= status.world_size:
        return ""
    found = client.send_request(path, InspectJobRequest(Detail.WAITS)).inspection.by_number.get(rank)
    return "" if found is None or found.host == host_name() else found.host


def _choose_host(text: str, run: str | None, rank: int | None) -> str:
    """Choose the host of ``--hosts`` to connect to: the one that runs the rank."""
    hosts = [each.destination for each in parse_hosts(text)]
    if len(hosts) == 1:
        return hosts[0]
    if rank is None:
        what = f"--hosts {sanitize_line(text, 60)} has {len(hosts)} hosts"
        raise UsageError(what, "name one of them, or a rank with --rank")
    words = [*launcher_command(sys.executable), "stacks", *([run] if run else []), "--json"]
    for host in hosts:
        command = find_host_connector("--hosts").interactive_command(host, words, terminal=False)
        try:
            output = run_program(*command, seconds=HOST_QUERY_TIMEOUT_S).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        if name := _host_from_stacks(output, rank):
            same = (each for each in hosts if each.rpartition("@")[2].partition(".")[0] == name.partition(".")[0])
            return next(same, name)
    what = f"rank {rank} was not found on the hosts of --hosts {sanitize_line(text, 60)}"
    raise JobNotResponding(what, "ddplaunch ps on a host shows what runs there")


def _host_from_stacks(output: str | None, rank: int) -> str:
    """Return the host of a rank from the output of ``stacks --json``; "" if unknown."""
    try:
        hosts = {each["rank"]: each["host"] for each in json.loads(output or "{}").get("ranks", ())}
        return str(hosts.get(rank, ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def _run_on_host(host: str, words: list[str], needed_by: str) -> int:
    connector = find_host_connector(needed_by)
    words = [*launcher_command(sys.executable), *words]
    return _exec_command(connector.interactive_command(host, words, terminal=os.isatty(0)))


def _run_in_job_step(batch_job: RunningBatchJob, words: list[str]) -> int:
    scheduler, state = get_scheduler(batch_job.job), batch_job.state
    return _exec_command(*scheduler.interactive_command(batch_job.job, state, words, terminal=os.isatty(0)))


def _exec_command(command: list[str], env: Mapping[str, str] = os.environ) -> int:
    """Replace this process by a command on another node that uses this terminal."""
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        raise StepNotStarted(f"cannot run {command[0]}: {error.strerror}", "it must be on PATH") from None
