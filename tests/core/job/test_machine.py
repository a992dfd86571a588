"""Histories of a job, replayed without processes: what happens, when, and what the machine decides.

A step's expected commands are those since the step before; what goes to several nodes is one line. The words for events
and commands are in job_world.py. See also test_stops.py and test_nodes.py.
"""

from __future__ import annotations

from signal import SIGINT, SIGKILL, SIGTERM

import pytest

from ddplaunch.core import messages
from ddplaunch.core.clock_offset import ClockOffset
from ddplaunch.core.job import job_attempt
from ddplaunch.core.job import job_events as ev
from ddplaunch.core.messages import Versions
from tests.core.job.job_steps import joined
from tests.core.job.job_world import History, failed, finished, is_over, job, joins, lost, replay, reported, signalled
from tests.core.machine_histories import WALL, step

LOST_PEER = "RuntimeError: Connection closed by peer"
ZYGOTE = "the zygote (pid 7) was ended by SIGKILL"
USED_UP = "no restarts left (--max-restarts 1)"
WAITED = "30 s (--grace) for the other ranks on node 0 (n0), node 1 (n1)"
HINT = "does the same command run there, and can it reach port None of node 0?"
LOST_1 = "node 1 (n1) was lost: it went"

HISTORIES: dict[str, History] = {
    "all start when the last node has joined": (
        job(min_nodes=3),
        step(0, joins(2), "0: status: 1/3 nodes joined, waiting for node 1, 2", "2: accept"),
        step(0, joins(1), "1: accept", "all: start attempt 0"),
    ),
    "too few nodes join in time": (
        job(min_nodes=2, join_timeout=60.0),
        step(0, None, "0: status: 1/2 nodes joined, waiting for node 1"),
        step(59.9, None),
        step(60, None, f"0: end, 69: only 1 of 2 nodes joined in 60 s (--join-timeout): node 1 is missing\n  {HINT}"),
    ),
    "an open join window outlasts the join timeout": (
        job(2, max_nodes=3, join_window=100.0, join_timeout=60.0),
        step(
            10,
            lost(1),
            "all: status: 2 of 2 to 3 nodes joined, starting in 100 s unless node 2 joins first",
            "0: note: node 1 (n1) has left: it went",
        ),
        step(11, joins(1), "0: status: 1 of 2 to 3 nodes joined, waiting for node 1, 2", "1: accept"),
        step(12, None, "all: status: 2 of 2 to 3 nodes joined, starting in 100 s unless node 2 joins first"),
        step(62, None),
        step(62, lost(1), "0: note: node 1 (n1) has left: it went"),
        step(
            122,
            None,
            "0: status: 1 of 2 to 3 nodes joined, waiting for node 1, 2",
            f"0: end, 69: only 1 of at least 2 nodes joined in 60 s (--join-timeout): node 1, 2 are missing\n  {HINT}",
        ),
    ),
    "a node that leaves while others are awaited may come back": (
        job(2, min_nodes=3),
        step(0, lost(1), "all: status: 2/3 nodes joined, waiting for node 2", "0: note: node 1 (n1) has left: it went"),
        step(0.1, joins(2), "0: status: 1/3 nodes joined, waiting for node 1, 2", "2: accept"),
        step(0.2, joins(1), "1: accept", "all: start attempt 0"),
    ),
    "an elastic job waits for more nodes during the join window": (
        job(min_nodes=2, max_nodes=4, join_window=30.0),
        step(100, joins(3), "0: status: 1 of 2 to 4 nodes joined, waiting for node 1, 2, 3", "3: accept"),
        step(129, None, "all: status: 2 of 2 to 4 nodes joined, starting in 30 s unless node 1, 2 joins first"),
        step(130, None, "all: start attempt 0"),
    ),
    "the join window begins anew when too few are left": (
        job(2, max_nodes=3, join_window=10.0),
        step(
            5,
            lost(1),
            "all: status: 2 of 2 to 3 nodes joined, starting in 10 s unless node 2 joins first",
            "0: note: node 1 (n1) has left: it went",
        ),
        step(25, joins(1), "0: status: 1 of 2 to 3 nodes joined, waiting for node 1, 2", "1: accept"),
        step(34, None, "all: status: 2 of 2 to 3 nodes joined, starting in 10 s unless node 2 joins first"),
        step(35, None, "all: start attempt 0"),
    ),
    "a node that never gets ranks is waited for, is not compared, and gets the stop": (
        job(2, min_nodes=3, without_ranks=1),
        step(0.1, None, "all: status: 2/3 nodes joined, waiting for node 2"),
        step(0.1, joins(2, versions=Versions("3.10")), "2: accept", "0, 1: start attempt 0"),
        step(9, signalled(0, SIGINT), "1, 2: note: Ctrl-C on node 0 (n0)", "all: stop, SIGINT, 30 s"),
        step(9, lost(2)),
        step(9.1, reported(0)),
        step(9.2, reported(1), "all: end, 130"),
    ),
    "no restart without a node that never gets ranks": (
        job(2, without_ranks=1, max_restarts=1),
        step(9, lost(1)),
        step(9, failed(0, 0), "0: stop, SIGTERM, 30 s"),
        step(9.1, reported(0), "0: end, 1, rank 0 failed, 0 stopped: 1 of at least 2 nodes are left to start again"),
    ),
    "an interrupt ends the wait for nodes": (
        job(2, min_nodes=3),
        step(
            0.1,
            signalled(1, SIGTERM),
            "all: status: 2/3 nodes joined, waiting for node 2",
            "0: note: SIGTERM on node 1 (n1)",
            "all: end, 143",
        ),
    ),
    "a node of another job does not disturb a running job": (
        job(2),
        step(1, joins(1), "refuse: the job is running already, without this node 1 (n1)"),
        step(1, joins(1, max_restarts=9), "refuse: --max-restarts differs: node 0 (n0) has 0, node 1 (n1) has 9"),
    ),
    "a job of two nodes succeeds": (
        job(2),
        step(1, (0, messages.RanksStarted(0))),
        step(1, (1, messages.RanksStarted(0))),
        step(60, finished(1)),
        step(60.1, reported(1)),
        step(61, None, "1: note: the ranks of this node are done; waiting for node 0 (n0)"),
        step(65, finished(0)),
        step(65.1, reported(0), "all: end, 0"),
    ),
    "the first failure stops all, and all get it": (
        job(2),
        step(5, failed(1, 2, exit_code=3), "all: stop, SIGTERM, 30 s"),
        step(5.1, reported(1, stopped=1)),
        step(5.2, reported(0, stopped=2), "all: end, 3, rank 2 failed, 3 stopped"),
    ),
    "a failure is reported early once, while the ranks are inspected": (
        job(2, inspect=True, features=None),
        step(5, failed(1, 2), "all: RpcRequest"),
        step(5.6, failed(0, 0), f"all: note: rank 2 exited with code 1 (on n1); waiting up to {WAITED}"),
        step(10, None, "0: RanksInspected", "all: stop, SIGTERM, 30 s"),
    ),
    "several ranks fail at once: the first by one clock is the cause": (
        job(2, grace=5.0),
        step(10, failed(1, 3, ago=0.1, exit_code=7), "all: stop, SIGTERM, 5 s"),
        step(10, failed(1, 2, ago=0.05)),
        step(10, failed(0, 0, ago=0.5, exit_code=4)),
        step(
            10.6,
            None,
            "all: note: rank 0 exited with code 4 (on n0); "
            "waiting up to 5 s (--grace) for the other ranks on node 0 (n0), node 1 (n1)",
        ),
        step(11, reported(1)),
        step(11, reported(0), "all: end, 4, rank 0 failed, 0 stopped"),
    ),
    "the node whose clock is an hour behind has not failed first": (
        job(2),
        step(5, failed(0, 0, exit_code=4), "all: stop, SIGTERM, 30 s"),
        step(5.5, failed(1, 2, exit_code=5, behind=3600)),
        step(5.5, reported(0)),
        step(5.5, reported(1), "all: end, 4, rank 0 failed, 0 stopped"),
    ),
    "a secondary failure arrives before its cause": (
        job(2),
        step(10, failed(0, 0, message=LOST_PEER)),
        step(10.5, failed(1, 2, ago=0.7, exit_code=None, signal=SIGKILL), "all: stop, SIGTERM, 30 s"),
        step(10.6, reported(0)),
        step(10.6, reported(1), "all: end, 137, rank 2 failed, 0 stopped"),
    ),
    "a node may leave after its ranks have ended": (
        job(2),
        step(5, finished(1)),
        step(5, reported(1)),
        step(5.1, lost(1)),
        step(5.2, finished(0)),
        step(5.3, reported(0), "0: end, 0"),
    ),
    "a failure is sent to nodes that have finished": (
        job(2),
        step(5, finished(1)),
        step(5, reported(1)),
        step(5.1, failed(0, 1, exit_code=3), "0: stop, SIGTERM, 30 s"),
        step(5.2, reported(0), "all: end, 3, rank 1 failed, 0 stopped"),
    ),
    "finished nodes show which nodes they wait for, again only if these are others": (
        job(4),
        step(1, finished(1)),
        step(1, finished(2)),
        step(1, reported(1)),
        step(1.9, None),
        step(2, None, "1, 2: note: the ranks of this node are done; waiting for node 0 (n0), node 3 (n3)"),
        step(2, finished(3)),
        step(31.9, None),
        step(32, None, "1, 2, 3: note: the ranks of this node are done; waiting for node 0 (n0)"),
        step(132, None),
    ),
    "a node that has drained may still send what is not about its ranks": (
        job(2),
        step(5, finished(1)),
        step(5, reported(1)),
        step(5, (1, messages.ProgressResumed(0))),
    ),
    "all nodes restart together": (
        job(2, max_restarts=1, min_uptime=0.0),
        step(5, failed(1, 2), "all: stop, SIGTERM, 30 s"),
        step(5, reported(1)),
        step(5.5, reported(0), "all: restart: rank 2 exited with code 1 (on n1); restart 1 of 1"),
        step(5.5, None, "all: start attempt 1"),
        step(7, failed(0, 0)),
        step(8, failed(0, 0, 1), "all: stop, SIGTERM, 30 s"),
        step(8, reported(0, 1)),
        step(8, reported(1, 1), f"all: end, 1, rank 0 failed, 0 stopped: {USED_UP}"),
    ),
    "a crash loop is given up: the wait doubles with each short attempt": (
        job(max_restarts=9, restart_backoff=2.0, min_uptime=5.0),
        step(1, failed(0, 0), "0: stop, SIGTERM, 30 s"),
        step(1, reported(0), "0: restart: rank 0 exited with code 1; restart 1 of 9 in 2 s"),
        step(3, None, "0: start attempt 1"),
        step(4, failed(0, 1, 1), "0: stop, SIGTERM, 30 s"),
        step(4, reported(0, 1), "0: restart: rank 1 exited with code 1; restart 2 of 9 in 4 s"),
        step(8, None, "0: start attempt 2"),
        step(9, failed(0, 0, 2), "0: stop, SIGTERM, 30 s"),
        step(
            9,
            reported(0, 2),
            "0: end, 1, rank 0 failed, 0 stopped: giving up: 3 attempts in a row lasted less than 5 s (--min-uptime)",
        ),
    ),
    "messages of an earlier attempt change nothing": (
        job(2, max_restarts=1),
        step(10, failed(0, 0), "all: stop, SIGTERM, 30 s"),
        step(10, reported(0)),
        step(10, reported(1), "all: restart: rank 0 exited with code 1 (on n0); restart 1 of 1"),
        step(10, None, "all: start attempt 1"),
        step(10.1, failed(1, 2)),
        step(10.1, reported(1)),
        step(10.1, finished(1)),
        step(10.1, (1, messages.HoldChanged(0, True))),
    ),
    "a node is lost in the wait before a restart, which comes at its time": (
        job(3, min_nodes=2, max_restarts=1, restart_backoff=5.0, max_nodes=3),
        step(1, failed(0, 0), "all: stop, SIGTERM, 30 s"),
        step(1, reported(0)),
        step(1, reported(1)),
        step(1, reported(2), "all: restart: rank 0 exited with code 1 (on n0); restart 1 of 1 in 5 s"),
        step(2, lost(1), f"all: note: {LOST_1}"),
        step(6, None, "all: start attempt 1"),
    ),
    "a node is lost in the wait before a restart, and is needed": (
        job(2, max_restarts=1, restart_backoff=5.0),
        step(1, failed(0, 0), "all: stop, SIGTERM, 30 s"),
        step(1, reported(0)),
        step(1, reported(1), "all: restart: rank 0 exited with code 1 (on n0); restart 1 of 1 in 5 s"),
        step(2, lost(1), f"0: end, 69: {LOST_1}"),
    ),
    "Ctrl-C in the wait before a restart": (
        job(max_restarts=1, restart_backoff=600.0),
        step(10, failed(0, 0), "0: stop, SIGTERM, 30 s"),
        step(10, reported(0), "0: restart: rank 0 exited with code 1; restart 1 of 1 in 600 s"),
        step(11, signalled(0, SIGINT), "0: end, 130"),
    ),
    "a lost node ends a job of fixed size": (
        job(2, max_restarts=5),
        step(5, lost(1), "0: NodeLost", f"0: note: {LOST_1}; stopping the others", "0: stop, SIGTERM, 30 s"),
        step(5.1, failed(0, 0, message=LOST_PEER)),
        step(6, reported(0), f"0: end, 69: {LOST_1}"),
    ),
    "a failure long before the loss is the cause": (
        job(2),
        step(30, failed(0, 0, ago=20, exit_code=3), "all: stop, SIGTERM, 30 s"),
        step(30, lost(1), "0: NodeLost", f"0: note: {LOST_1}"),
        step(30.1, reported(0), "0: end, 3, rank 0 failed, 0 stopped"),
    ),
    "a failure on the node that was lost then is the cause": (
        job(2),
        step(5, failed(1, 2, exit_code=3, message="ValueError: boom"), "all: stop, SIGTERM, 30 s"),
        step(5, lost(1), "0: NodeLost", f"0: note: {LOST_1}"),
        step(5.1, reported(0), "0: end, 3, rank 2 failed, 0 stopped"),
    ),
    "a signal is nothing that a lost peer does to a rank": (
        job(2),
        step(5, failed(0, 0, exit_code=None, signal=SIGKILL), "all: stop, SIGTERM, 30 s"),
        step(5, lost(1), "0: NodeLost", f"0: note: {LOST_1}"),
        step(5.1, reported(0), "0: end, 137, rank 0 failed, 0 stopped"),
    ),
    "an exception just before the loss may be a word for it": (
        job(2),
        step(5, failed(0, 0, message="RuntimeError: my peer is silent"), "all: stop, SIGTERM, 30 s"),
        step(5, lost(1), "0: NodeLost", f"0: note: {LOST_1}"),
        step(5.1, reported(0), f"0: end, 69: {LOST_1}"),
    ),
    "a failure after the last sign of life of a node that is lost": (
        job(2),
        step(9, failed(0, 0), "all: stop, SIGTERM, 30 s"),
        step(9, lost(1, silent_s=5.0), "0: NodeLost", f"0: note: {LOST_1}"),
        step(10, reported(0), f"0: end, 69: {LOST_1}"),
    ),
    "a zygote is lost in a job of one node": (
        job(),
        step(5, reported(0, broken=ZYGOTE), "0: end, 137: the zygote (pid 7) was ended by SIGKILL"),
    ),
    "a zygote that is lost after a failure is not the cause": (
        job(2),
        step(5, failed(0, 0, exit_code=3, message="ValueError: mine"), "all: stop, SIGTERM, 30 s"),
        step(5.4, reported(1, broken=ZYGOTE)),
        step(5.5, reported(0), "all: end, 137: the zygote (pid 7) was ended by SIGKILL (on n1)"),
    ),
    "a zygote that is lost before a connection is the cause": (
        job(2),
        step(5, reported(1, broken=ZYGOTE), "0: stop, SIGTERM, 30 s"),
        step(5.5, failed(0, 0, message="RuntimeError: connection closed by peer")),
        step(6, reported(0), "all: end, 137: the zygote (pid 7) was ended by SIGKILL (on n1)"),
    ),
    "a zygote that is lost before an unknown exception is the cause": (
        job(2),
        step(5, reported(1, broken=ZYGOTE), "0: stop, SIGTERM, 30 s"),
        step(5.5, failed(0, 0, message="OSError: a word that we do not know")),
        step(6, reported(0), "all: end, 137: the zygote (pid 7) was ended by SIGKILL (on n1)"),
    ),
    "a lost zygote ends a job with --restart-on 75: its ranks were killed": (
        job(2, max_restarts=1, restart_on="75"),
        step(5, reported(1, broken=ZYGOTE), "0: stop, SIGTERM, 30 s"),
        step(
            5,
            reported(0, stopped=2),
            "all: end, 137: the zygote (pid 7) was ended by SIGKILL (on n1); "
            "not restarting: exit code 137 is not in --restart-on 75",
        ),
    ),
    **{
        f"a lost zygote uses a restart, with --restart-on {how}": (
            job(2, max_restarts=1, restart_on=how, restart_backoff=0.0),
            step(5, reported(1, broken=ZYGOTE), "0: stop, SIGTERM, 30 s"),
            step(
                5,
                reported(0, stopped=2),
                "all: restart: the zygote (pid 7) was ended by SIGKILL (on n1); restart 1 of 1",
            ),
            step(6, reported(1, 1, broken=ZYGOTE), "all: start attempt 1", "0: stop, SIGTERM, 30 s"),
            step(
                6,
                reported(0, 1, stopped=2),
                f"all: end, 137: the zygote (pid 7) was ended by SIGKILL (on n1); {USED_UP}",
            ),
        )
        for how in ("any", "transient", "always", "75,137")
    },
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES.keys())
def test_history(history: History) -> None:
    replay(history)


@pytest.mark.parametrize("name", ["a job of two nodes succeeds", "Ctrl-C in the wait before a restart"])
def test_nothing_is_left_after_the_end(name: str) -> None:
    assert is_over(replay(HISTORIES[name]))


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("a job of two nodes succeeds", [(0, 0, "")]),
        ("the first failure stops all, and all get it", [(0, 3, "rank 2 exited with code 3 (on n1)")]),
        ("a lost node ends a job of fixed size", [(0, 69, LOST_1)]),
        (
            "all nodes restart together",
            [(0, 1, "rank 2 exited with code 1 (on n1)"), (1, 1, "rank 0 exited with code 1 (on n0)")],
        ),
        ("a lost zygote uses a restart, with --restart-on any", [(0, 137, f"{ZYGOTE} (on n1)")] * 2),
        ("too few nodes join in time", []),
        ("Ctrl-C in the wait before a restart", [(0, 1, "rank 0 exited with code 1")]),
    ],
)
def test_observers_see_how_each_attempt_has_ended(name: str, ends: list[tuple[int, int | None, str]]) -> None:
    found = replay(HISTORIES[name]).attempt_ends
    assert [(code, why.partition(";")[0]) for _, code, why in found] == [(code, why) for _, code, why in ends]
    assert [attempt for attempt, _, _ in found] == [*range(len(ends))]


def test_a_failure_is_sent_once_and_its_last_lines_with_the_report():
    """The failure of a rank that was being stopped is sent too."""
    job = joined(1)
    job.fail(1, 2, message="ValueError: boom", traceback="Traceback …\n  here")
    job.fail(0, 1, message="OSError: while it was stopped")
    job.send(0, messages.AttemptReport(0, 1, WALL))
    job.send(1, messages.AttemptReport(0, 1, WALL, tails=((2, ("its", "last lines")),)))
    verdict = job.outcome(0).outcome.verdict
    assert verdict
    assert (verdict.first.traceback, verdict.first.tail) == ("Traceback …\n  here", ("its", "last lines"))
    assert [(other.rank, other.message, other.tail) for other in verdict.others] == [
        (1, "OSError: while it was stopped", ())
    ]
    assert verdict.stopped == 2


def test_the_clock_offset_of_a_node_is_kept():
    job, offset = joined(1), ClockOffset(3.0, 0.1)
    for number in (1, 9):  # the other one has left
        job.on(ev.ClockMeasured(number, offset))
    assert job.machine._nodes[1].clock_offset == offset


def test_the_failures_of_many_ranks_do_not_fill_the_memory(monkeypatch):
    """The texts of later ones are cut to one line."""
    monkeypatch.setattr(job_attempt, "MAX_FAILURE_CHARS", 50)
    job = joined(1)
    failures = [job.fail(rank // 2, rank, message=f"E{rank}: one\ntwo", traceback="T" * 20) for rank in range(4)]
    for number in (0, 1):
        job.drain(number, *failures[number * 2 : number * 2 + 2])
    verdict = job.outcome(0).outcome.verdict
    assert [(each.message, each.traceback) for each in (verdict.first, *verdict.others)] == [
        ("E0: one\ntwo", "T" * 20), ("E1: one", None), ("E2: one", None), ("E3: one", None),
    ]  # fmt: skip
