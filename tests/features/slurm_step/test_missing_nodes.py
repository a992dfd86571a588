"""Tests of the checks whether tasks of a Slurm step are alive, with a program in the place of srun."""

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.options import Options
from ddplaunch.core.messages import ConnectingToNodeZero, EndJob, JoinStatus
from ddplaunch.core.option_values import AUTO
from ddplaunch.core.options import Elastic, Nodes
from ddplaunch.features.slurm_step import node
from ddplaunch.features.slurm_step.feature import FEATURE
from ddplaunch.features.slurm_step.node import JoinWatcher, parse_listpids
from tests.conftest import write_program
from tests.features.runs.recorded_events import plan
from tests.scaled_timeouts import scaled_timeout
from tests.system.clusters.recorded_environments import slurm_step

HEAD = "PID      JOBID    STEPID   LOCALID GLOBALID\n"
TASK, CHILD = (f"43       7        0        {ids}       \n" for ids in ("0        2", "-        -"))
NONE = "StepId=7.0 does not exist on node (null).\n"


@pytest.mark.parametrize(
    ("listed", "count", "alive"),
    [
        (f"0: {HEAD}0: {TASK}0: {CHILD}", 1, {2}),
        (f"1: {NONE}0: {HEAD}0: {TASK}", 2, {2}),
        (f"0: {HEAD}0: {NONE}", 1, set()),
        (f"0: {HEAD}", 2, None),  # not all nodes have answered
        ("srun: error: Unable to create step for job 7: Access denied\n", 1, None),
        ("", 1, None),
    ],
)
def test_which_tasks_are_alive(listed, count, alive):
    assert parse_listpids(listed, count) == alive


SRUN = '#!/bin/sh\nenv > srun.env; echo "$@" >> srun.words; printf \'%s\' "$LISTED"\n'


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Let srun print a list; return the errors of a node for which others are missing, and the words of each srun."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(node, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(node, "STAGGER_S", 0.0)
    write_program(tmp_path, "srun", SRUN).chmod(0o755)

    def check(listed, message, checks=2, nodes="n[1-3]", tasks="1(x3)", environ=(), **of_plan):
        count = 3 if tasks == "1(x3)" else 4
        step = slurm_step(tasks, nodes, 3, count, 0, 0, 0, SLURM_CONF="/etc/conf", LISTED=listed, **dict(environ))
        for name, value in {**step, "PATH": f"{tmp_path}:{os.environ['PATH']}"}.items():
            monkeypatch.setenv(name, value)
        loop, errors = EventLoop(), []
        context = SimpleNamespace(loop=loop, plan=replace(plan(), **of_plan), job=SimpleNamespace(send=errors.append))
        watcher, words = JoinWatcher(cast("Any", context)), tmp_path / "srun.words"
        over = loop.call_later(scaled_timeout(20) if checks else 0.1, lambda: errors.append("no error"))
        watcher.on_message(message)
        while not errors and not (checks and words.exists() and len(words.read_text().splitlines()) > checks):
            loop.run_once()
        over.cancel()
        watcher.on_message(EndJob(0))
        assert loop.is_idle
        return errors, words.read_text().splitlines() if words.exists() else []

    return check


MISSING_2 = JoinStatus(2, 3, 3, (2,))
OF_MORE_TASKS = {"tasks": "2,1,1", "started_rank": {"RANK": "0"}}


def gone(what: str) -> str:
    return f"Slurm reports that {what} ended"


@pytest.mark.parametrize(
    ("message", "listed", "others", "error", "hosts"),
    [
        (MISSING_2, f"0: {NONE}", {}, gone("node 2 (n3) has"), "n3"),
        (JoinStatus(1, 3, 3, (1, 2)), f"0: {NONE}1: {NONE}", {}, gone("nodes 1 (n2), 2 (n3) have"), "n2,n3"),
        (MISSING_2, f"0: {NONE}1: {NONE}2: {NONE}", OF_MORE_TASKS, gone("task 2 has"), "n1,n2,n3"),
        (JoinStatus(2, 3, 3, (0,)), f"0: {NONE}", OF_MORE_TASKS, gone("task 0 has"), "n1"),
        (ConnectingToNodeZero("no answer"), f"0: {NONE}", {"node_rank": 1}, gone("node 0 (n1) has"), "n1"),
    ],
)
def test_missing_nodes_are_reported_after_two_checks(check, tmp_path, message, listed, others, error, hosts):
    errors, words = check(listed, message, **others)
    assert [each.message for each in errors] == [error]
    count = hosts.count(",") + 1
    assert words == 2 * [
        f"--overlap --jobid=1 --input=none --label --quiet --nodelist={hosts} --nodes={count} --ntasks={count} "
        "--ntasks-per-node=1 scontrol listpids 1.0"
    ]
    environ = (tmp_path / "srun.env").read_text()
    assert "SLURM_CONF=/etc/conf" in environ
    assert "SLURM_STEP_ID" not in environ


@pytest.mark.parametrize("listed", [f"0: {HEAD}0: {TASK}", "srun: error: no answer\n"])
def test_a_node_that_is_alive_or_unknown_is_not_reported(check, listed):
    errors, words = check(listed, MISSING_2, checks=3)
    assert (errors, len(words)) == ([], 4)


@pytest.mark.parametrize(
    ("message", "others"),
    [
        (JoinStatus(2, 2, 3, (2,)), {}),  # an elastic job may begin without it
        (MISSING_2, {"node_rank": 1}),  # node 0 checks it
        (JoinStatus(3, 3, 3, ()), {}),
        (MISSING_2, {"environ": {"SLURM_DISTRIBUTION": "arbitrary"}}),
        (MISSING_2, {"nodes": "n[1-65]", **OF_MORE_TASKS}),
    ],
)
def test_where_tasks_are_not_known_or_not_needed_srun_is_not_started(check, message, others):
    assert check(f"0: {NONE}", message, checks=0, **others) == (["no error"], [])


def test_outside_a_step_of_the_job_nothing_is_checked(monkeypatch):
    cluster_env = SimpleNamespace(cluster="slurm", is_batch_script=False)
    context = SimpleNamespace(options=None, cluster_env=cluster_env, plan=plan())
    for step in (True, False):
        monkeypatch.setenv("SLURM_STEP_ID", "0") if step else monkeypatch.delenv("SLURM_STEP_ID")
        assert isinstance(FEATURE.make_node_side(cast("Any", context)), JoinWatcher) is step
    for change in ({"cluster": "openmpi"}, {"is_batch_script": True}):
        other = SimpleNamespace(**{**vars(cluster_env), **change})
        assert not node.is_step_of_job(cast("Any", None), cast("Any", other), 0)


@pytest.mark.parametrize(
    ("tasks", "nnodes", "spares", "typed", "is_one"),
    [
        ("1(x3)", 3, 0, AUTO, True),
        ("1(x3)", 2, 1, AUTO, True),
        ("1(x3)", 2, 0, AUTO, False),  # a task may be anything else
        ("1(x3)", 3, 0, 1, True),
        ("1(x3)", 3, 0, 2, False),  # the nodes are not in the order of the tasks
        ("2,1,1", 4, 0, AUTO, True),
        ("2,1,1", 4, 0, 1, False),
    ],
)
def test_tasks_that_are_the_nodes_of_a_job(monkeypatch, tasks, nnodes, spares, typed, is_one):
    for name, value in slurm_step(tasks, "n[1-3]", 3, 3 if tasks == "1(x3)" else 4, 1, 0, 1).items():
        monkeypatch.setenv(name, value)
    options = Options({Nodes: Nodes(nnodes=(nnodes, nnodes), node_rank=typed), Elastic: Elastic(spares=spares)}, {})
    assert node.is_step_of_job(options, None, 0 if typed == AUTO else typed) is is_one
