"""Tests of where ``ddplaunch debug`` connects to, and of the note about the timeout of ranks that wait."""

import json
import os
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddplaunch.base.errors import LaunchError
from ddplaunch.cli import launcher_command
from ddplaunch.cli.lookup.batch_jobs import RunningBatchJob
from ddplaunch.core.rank.rank_runner import load_private_module
from ddplaunch.features.debug import command, debug_server
from ddplaunch.system.schedulers.scheduler import BatchJobState, Scheduler

STACKS = {"n1": "not JSON", "n2": "{}", "ada@n2": json.dumps({"ranks": [{"rank": 3, "host": "n2.cluster"}]})}
FOUND = SimpleNamespace(by_number={3: SimpleNamespace(host="n2"), 5: SimpleNamespace(host=command.host_name())})
REPLIES = {
    "StatusQuery": SimpleNamespace(ranks=[SimpleNamespace(rank=0)], world_size=9),
    "InspectJobRequest": SimpleNamespace(inspection=FOUND),
}
BATCH = {"Slurm": "srun", "PBS": "pbsdsh"}
SRUN = "srun --overlap --jobid=7 --nodes=1 --ntasks=1 --nodelist=n2 --input=all LAUNCHER debug demo --rank 3"


@pytest.mark.parametrize(
    ("rank", "hosts", "environ", "ran"),  # hosts: "in PBS" for a batch job
    [
        (None, "n1", {}, "on n1 LAUNCHER debug demo"),
        (3, "n1,ada@n2", {}, "on ada@n2 LAUNCHER debug demo --rank 3"),
        (None, "n1,n2", {}, "--hosts n1,n2 has 2 hosts"),
        (4, "n1,n2", {}, "rank 4 was not found on the hosts of --hosts n1,n2"),
        (0, None, {command.OVER_SSH_VARIABLE: "1"}, "this machine, rank 0"),
        (3, None, {command.OVER_SSH_VARIABLE: "1"}, "on n2 LAUNCHER debug demo --rank 3"),
        (3, None, {"SLURM_JOB_ID": "7"}, SRUN),
        (3, None, {}, "this machine, rank 3"),
        (5, None, {"SLURM_JOB_ID": "7"}, "this machine, rank 5"),
        (9, None, {"SLURM_JOB_ID": "7"}, "this machine, rank 9"),
        (None, "in Slurm", {}, "srun n0 debug demo"),
        (3, "in Slurm", {}, "srun n2 debug demo --rank 3"),
        (4, "in Slurm", {}, "srun n0 debug demo --rank 4"),
        (3, "in PBS", {}, "PBS cannot give a terminal on the nodes of job 7"),
    ],
)
def test_where_a_rank_is_debugged(monkeypatch, rank, hosts, environ, ran):
    def run(words):
        raise LaunchError(" ".join(words).replace(" ".join(launcher_command(sys.executable)), "LAUNCHER"))

    connector = SimpleNamespace(interactive_command=lambda host, words, terminal: ["on", host, *words])
    monkeypatch.setattr(command, "find_host_connector", lambda needed_by: connector)
    monkeypatch.setattr(command, "run_program", lambda on, host, *_, seconds: SimpleNamespace(stdout=STACKS[host]))
    name, state = (hosts or "").removeprefix("in "), BatchJobState("runs", number="7", host="n0")
    batch_job = RunningBatchJob(cast("Any", name), state, "demo") if name in BATCH else None
    monkeypatch.setattr(command, "find_running_batch_job", lambda run, command: batch_job)
    replies = json.dumps({"ranks": [{"rank": 3, "host": "n2"}]})
    monkeypatch.setattr(command, "query_node_zero", lambda job, state, words, seconds: replies)
    scheduler = Scheduler()
    scheduler.title = name
    monkeypatch.setattr(scheduler, "step_command", lambda job, state, words, everywhere: (words, {}))
    if BATCH.get(name) == "srun":
        step = lambda job, state, words, terminal: (["srun", state.host, *words], {})  # noqa: E731
        monkeypatch.setattr(scheduler, "interactive_command", step)
    monkeypatch.setattr(command, "get_scheduler", lambda job: scheduler)
    monkeypatch.setattr(command, "find_running", lambda run: SimpleNamespace(path="", run_id="demo", pid=1))
    monkeypatch.setattr(command.psutil, "Process", lambda pid: SimpleNamespace(environ=lambda: environ))
    monkeypatch.setattr(command.client, "send_request", lambda path, request: REPLIES[type(request).__name__])
    monkeypatch.setattr(command, "DebugClient", lambda path, rank: run(["this machine, rank", str(rank)]))
    monkeypatch.setattr(os, "execvpe", lambda program, words, env: run(words))
    with pytest.raises(LaunchError) as raised:
        command.debug.callback("demo", rank, None if batch_job else hosts)
    assert raised.value.message == ran


@pytest.mark.parametrize(
    ("left", "timeout", "note", "checks"),
    [
        (600.0, 1800.0, "in 10m00s (torch's timeout); run --debug sets 24 hours", [540.0]),
        (120.0, 1800.0, "in 2m00s (torch's timeout); run --debug sets 24 hours", []),
        (59.0, 1800.0, "in 59s (torch's timeout)", []),
        (0.0, 1800.0, None, []),
        (86_000.0, 86_400.0, None, []),
        (600.0, 0.0, None, []),
    ],
)
def test_a_stopped_rank_and_the_timeout_of_the_others(left, timeout, note, checks):
    notes, delays = [], []
    loop = SimpleNamespace(call_later=lambda seconds, callback: delays.append(seconds))
    server = debug_server.DebugServer(loop, None, 60.0, None, notes.append, None)
    server._known[0] = SimpleNamespace(stopped="stopped")
    calls = [(False, left), (False, left + 1), (True, left - 1)]
    last = [SimpleNamespace(completed=done, timeout=timeout, entered=at, operation="send") for done, at in calls]
    inspection = SimpleNamespace(moment=timeout, ranks=[SimpleNamespace(last=last)])
    server._report_time_left("stopped", inspection)
    assert (notes, delays) == ([f"send of the other ranks times out {note}"] * bool(note), checks)
    server._report_time_left("resumed", inspection)
    assert len(notes) == bool(note)


def test_debug_sets_the_default_timeouts_of_groups_to_a_day():
    hooks = load_private_module("features/debug/rank/breakpoint_hooks")
    half_hour, day = timedelta(minutes=30), timedelta(days=1)
    module = SimpleNamespace(timedelta=timedelta, default_pg_timeout=half_hour, default_pg_nccl_timeout=None)
    hooks._set_long_timeouts(module)
    assert (module.default_pg_timeout, module.default_pg_nccl_timeout) == (day, None)
