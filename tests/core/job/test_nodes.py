"""Histories of a job whose nodes change: elastic jobs, nodes that leave or join, and the checks of nodes."""

from __future__ import annotations

from signal import SIGINT, SIGTERM, SIGUSR2
from typing import Any

import pytest

from ddplaunch.base.options import Options
from ddplaunch.features.check.options import Checking
from tests.core.job.job_world import (
    History,
    cannot_start,
    check_goes_on,
    failed,
    finished,
    job,
    joins,
    lost,
    noticed,
    passed,
    replay,
    reported,
    signalled,
)
from tests.core.machine_histories import step

LOST_PEER = "RuntimeError: Connection closed by peer"
FULL = "/dev/shm is full"
CHECKED: dict[str, Any] = {"options": Options({Checking: Checking(check=True)}, {}), "features": None}
"""A job whose nodes check their machines."""
LEAVES = "SIGTERM on node 1 (n1): it leaves the job; stopping the ranks, to continue without it"
LEFT = "end, 143: SIGTERM: this node has left the job, which continues without it"
LEFT_OUT = "node 1 (n1) is left out: /dev/shm is full"
FULL_1 = "end, 2, error node 1 (n1): /dev/shm is full"
TOO_FEW = "without it 1 of at least 2 nodes are left"
START_WITHOUT = "has not answered in 25 s: the ranks start without it"
NOTICED = "preempted by SIGUSR2 on node 0 (n0)"
LATE = "it takes part when the ranks start next"
WINDOW = "all: status: 2 of 2 to 3 nodes joined, starting in 0 s unless node 2 joins first"
SAVE = "to save a checkpoint"
LOST_1 = "node 1 (n1) was lost: it went"

HISTORIES: dict[str, History] = {
    "an elastic job continues with fewer nodes, and adds new ones at the next start": (
        job(3, min_nodes=2, max_nodes=3, min_uptime=0.0, max_restarts=1),
        step(5, lost(1), "0: NodeLost", f"all: note: {LOST_1}; stopping the others", "all: stop, SIGTERM, 30 s"),
        step(5, reported(0)),
        step(5, reported(2), "all: note: going on with 2 nodes: node 0 (n0), node 2 (n2)"),
        step(5, None, "all: start attempt 1"),
        step(6, joins(1), "1: accept, late", f"all: note: node 1 (n1) has joined; {LATE}"),
        step(7, failed(2, 2, 1), "0, 2: stop, SIGTERM, 30 s"),
        step(7, reported(2, 1)),
        step(7, reported(0, 1), "all: restart: rank 2 exited with code 1 (on n2); restart 1 of 1"),
        step(7, None, "all: start attempt 2"),
    ),
    "a lost node is replaced when another joins: --grow": (
        job(2, min_nodes=1, max_nodes=2, grow=True),
        step(
            10,
            lost(1, "no heartbeat for 15.0 s", 15.0),
            "0: NodeLost",
            "0: note: node 1 (n1) was lost: no heartbeat for 15.0 s; stopping the others",
            "0: stop, SIGTERM, 30 s",
        ),
        step(11, reported(0), "0: note: going on with 1 node: node 0 (n0)"),
        step(11, None, "0: start attempt 1"),
        step(
            20,
            joins(1),
            "1: accept, late",
            "all: note: node 1 (n1) has joined: stopping the ranks, to start again with it",
            "0: stop, SIGTERM, 30 s",
        ),
        step(21, reported(0, 1), "all: note: going on with 2 nodes: node 0 (n0), node 1 (n1)"),
        step(21, None, "all: start attempt 2"),
    ),
    "a membership change uses no restart, and a node without ranks is not missed": (
        job(2, min_nodes=1, max_nodes=2, max_membership_changes=1),
        step(5, lost(1), "0: NodeLost", f"0: note: {LOST_1}; stopping the others", "0: stop, SIGTERM, 30 s"),
        step(5, reported(0), "0: note: going on with 1 node: node 0 (n0)"),
        step(5, None, "0: start attempt 1"),
        step(6, joins(1), "1: accept, late", f"all: note: node 1 (n1) has joined; {LATE}"),
        step(7, lost(1)),
    ),
    "membership changes are counted": (
        job(3, min_nodes=1, max_nodes=3, max_membership_changes=1),
        step(5, lost(1), "0: NodeLost", f"all: note: {LOST_1}; stopping the others", "all: stop, SIGTERM, 30 s"),
        step(5, reported(0)),
        step(5, reported(2), "all: note: going on with 2 nodes: node 0 (n0), node 2 (n2)"),
        step(5, None, "all: start attempt 1"),
        step(
            6,
            lost(2),
            "0: NodeLost",
            "0: note: node 2 (n2) was lost: it went; stopping the others",
            "0: stop, SIGTERM, 30 s",
        ),
        step(
            7, reported(0, 1), "0: end, 69: node 2 (n2) was lost: it went; limit reached (--max-membership-changes 1)"
        ),
    ),
    "a spare that is lost between attempts is no membership change": (
        job(4, min_nodes=2, max_nodes=4, spares=2, max_restarts=1, restart_backoff=1.0, max_membership_changes=1),
        step(5, failed(0, 0), "0, 1: stop, SIGTERM, 30 s"),
        step(5, reported(0)),
        step(5, reported(1), "all: restart: rank 0 exited with code 1 (on n0); restart 1 of 1 in 1 s"),
        step(5.5, lost(3), "all: note: node 3 (n3) was lost: it went"),
        step(6, None, "0, 1: start attempt 1"),
        step(7, lost(1), "0: NodeLost", f"all: note: {LOST_1}; stopping the others", "0: stop, SIGTERM, 30 s"),
        step(8, reported(0, 1), "all: note: going on with 2 nodes: node 0 (n0), node 2 (n2)"),
        step(9, None, "all: note: node 2 (n2) takes the place of node 1 (n1)", "all: start attempt 2"),
    ),
    "a node with ranks that is lost between attempts is one": (
        job(4, min_nodes=2, max_nodes=4, spares=2, max_restarts=1, restart_backoff=1.0, max_membership_changes=1),
        step(5, failed(0, 0), "0, 1: stop, SIGTERM, 30 s"),
        step(5, reported(0)),
        step(5, reported(1), "all: restart: rank 0 exited with code 1 (on n0); restart 1 of 1 in 1 s"),
        step(5.5, lost(1), f"all: note: {LOST_1}"),
        step(6, None, "all: note: node 2 (n2) takes the place of node 1 (n1)", "0, 2: start attempt 1"),
        step(
            7,
            lost(2),
            "0: NodeLost",
            "all: note: node 2 (n2) was lost: it went; stopping the others",
            "0: stop, SIGTERM, 30 s",
        ),
        step(
            8, reported(0, 1), "all: end, 69: node 2 (n2) was lost: it went; limit reached (--max-membership-changes 1)"
        ),
    ),
    "an elastic job ends with too few nodes": (
        job(3, min_nodes=2, max_nodes=3),
        step(5, lost(1), "0: NodeLost", f"all: note: {LOST_1}; stopping the others", "all: stop, SIGTERM, 30 s"),
        step(6, lost(2), "0: NodeLost", "0: note: node 2 (n2) was lost: it went"),
        step(7, reported(0), f"0: end, 69: {LOST_1}; 1 of at least 2 nodes are left"),
    ),
    "a node that joins after others have finished": (
        job(2, max_nodes=3, join_window=0.0, grow=True),
        step(0, None, WINDOW, "all: start attempt 0"),
        step(5, finished(1)),
        step(5.5, joins(2), "2: accept, late", "all: note: node 2 (n2) has joined, but the job is about to end"),
    ),
    "a node that joins while the ranks are stopped": (
        job(2, max_nodes=3, join_window=0.0, grow=True),
        step(0, None, WINDOW, "all: start attempt 0"),
        step(5, signalled(1, SIGINT), "0: note: Ctrl-C on node 1 (n1)", "all: stop, SIGINT, 30 s"),
        step(5.5, joins(2), "2: accept, late", f"all: note: node 2 (n2) has joined; {LATE}"),
    ),
    "a node that joins does not interrupt ranks that save a checkpoint": (
        job(2, max_nodes=3, join_window=0.0, grow=True, preempt_grace=20.0),
        step(0, None, WINDOW, "all: start attempt 0"),
        step(
            5,
            noticed(1, SIGUSR2),
            f"all: note: preempted by SIGUSR2 on node 1 (n1): ranks have 20 s (--preempt-grace) {SAVE}",
            "all: PreemptRanks",
        ),
        step(6, joins(2), "2: accept, late", f"all: note: node 2 (n2) has joined; {LATE}"),
        step(25, None, "all: note: --preempt-grace (20 s) expired: stopping the ranks", "0, 1: stop, SIGTERM, 30 s"),
    ),
    "a node that joins does not interrupt ranks that wait for the cause of a failure": (
        job(2, max_nodes=3, join_window=0.0, grow=True),
        step(0, None, WINDOW, "all: start attempt 0"),
        step(5, failed(1, 2, message=LOST_PEER)),
        step(5.5, joins(2), "2: accept, late", f"all: note: node 2 (n2) has joined; {LATE}"),
        step(6, None, "0, 1: stop, SIGTERM, 30 s"),
    ),
    "SIGTERM takes one node out of an elastic job": (
        job(3, min_nodes=2, max_nodes=3),
        step(5, signalled(1, SIGTERM), f"all: note: {LEAVES}", "all: stop, SIGTERM, 30 s"),
        step(5, failed(1, 2, exit_code=None, signal=SIGTERM)),
        step(5, reported(1), f"1: {LEFT}"),
        step(5.1, signalled(1, SIGTERM)),
        step(5.1, lost(1)),
        step(6, reported(0)),
        step(6, reported(2), "all: note: going on with 2 nodes: node 0 (n0), node 2 (n2)"),
        step(6, None, "all: start attempt 1"),
        step(7, joins(1), "1: accept, late", f"all: note: node 1 (n1) has joined; {LATE}"),
        step(8, signalled(1, SIGTERM), "0, 1, 2: note: node 1 (n1) has left: SIGTERM", "1: disconnect"),
        step(9, signalled(2, SIGTERM), "0: note: SIGTERM on node 2 (n2)", "all: stop, SIGTERM, 30 s"),
        step(9, reported(0, 1)),
        step(9, reported(2, 1), "all: end, 143"),
    ),
    "Ctrl-C on node 0 ends an elastic job": (
        job(3, min_nodes=1, max_nodes=3),
        step(5, signalled(0, SIGINT), "1, 2: note: Ctrl-C on node 0 (n0)", "all: stop, SIGINT, 30 s"),
        step(6, reported(0)),
        step(6, reported(1)),
        step(6, reported(2), "all: end, 130"),
    ),
    "Ctrl-C on node 1 ends an elastic job": (
        job(3, min_nodes=1, max_nodes=3),
        step(5, signalled(1, SIGINT), "0, 2: note: Ctrl-C on node 1 (n1)", "all: stop, SIGINT, 30 s"),
        step(6, reported(0)),
        step(6, reported(1)),
        step(6, reported(2), "all: end, 130"),
    ),
    "SIGTERM on node 0 ends an elastic job": (
        job(3, min_nodes=1, max_nodes=3),
        step(5, signalled(0, SIGTERM), "1, 2: note: SIGTERM on node 0 (n0)", "all: stop, SIGTERM, 30 s"),
        step(6, reported(0)),
        step(6, reported(1)),
        step(6, reported(2), "all: end, 143"),
    ),
    "SIGTERM on all nodes ends an elastic job, also if node 0 gets it last": (
        job(3, min_nodes=1, max_nodes=3),
        step(5, signalled(1, SIGTERM), f"all: note: {LEAVES}", "all: stop, SIGTERM, 30 s"),
        step(5, signalled(0, SIGTERM), "1, 2: note: SIGTERM on node 0 (n0)", "all: stop, SIGTERM, 30 s"),
        step(6, reported(0)),
        step(6, reported(1), f"1: {LEFT}"),
        step(6, reported(2), "0, 2: end, 143"),
    ),
    "Ctrl-C on a node that leaves ends the job, with the grace": (
        job(3, min_nodes=1, max_nodes=3),
        step(5, signalled(1, SIGTERM), f"all: note: {LEAVES}", "all: stop, SIGTERM, 30 s"),
        step(6, signalled(1, SIGINT, again=True), "0, 2: note: Ctrl-C on node 1 (n1)", "all: stop, SIGINT, 30 s"),
    ),
    "nodes leave during joining, checks and the wait for a restart": (
        job(2, max_nodes=3, **CHECKED, max_restarts=1, restart_backoff=5.0),
        step(
            0.1,
            signalled(1, SIGTERM),
            "all: status: 2 of 2 to 3 nodes joined, starting in 30 s unless node 2 joins first",
            "1: disconnect",
            "0: note: node 1 (n1) has left: SIGTERM",
        ),
        step(0.2, joins(1), "0: status: 1 of 2 to 3 nodes joined, waiting for node 1, 2", "1: accept"),
        step(0.2, joins(2), "2: accept", "all: CheckNode"),
        step(0.3, signalled(2, SIGTERM), "0, 1, 2: note: node 2 (n2) has left: SIGTERM", "2: disconnect"),
        step(0.3, passed(0)),
        step(0.3, passed(1), "all: start attempt 0"),
        step(1, joins(2), "2: accept, late", f"all: note: node 2 (n2) has joined; {LATE}"),
        step(2, failed(0, 0), "0, 1: stop, SIGTERM, 30 s"),
        step(2, reported(0)),
        step(2, reported(1), "all: restart: rank 0 exited with code 1 (on n0); restart 1 of 1 in 5 s"),
        step(3, signalled(1, SIGTERM), "0, 1, 2: note: node 1 (n1) has left: SIGTERM", "1: disconnect"),
        step(7, None, "all: CheckNode"),
        step(7, passed(0, 1)),
        step(7, passed(2, 1), "all: start attempt 1"),
    ),
    "a failure before the SIGTERM is the cause that counts": (
        job(3, min_nodes=2, max_nodes=3),
        step(30, failed(1, 2, ago=20, exit_code=3), "all: stop, SIGTERM, 30 s"),
        step(30, signalled(1, SIGTERM), f"all: note: {LEAVES}"),
        step(30.1, reported(1), f"1: {LEFT}"),
        step(30.1, reported(0)),
        step(30.1, reported(2), "0, 2: end, 3, rank 2 failed, 0 stopped"),
    ),
    "a node that has left gets one result, and may come back": (
        job(3, min_nodes=2, max_nodes=3),
        step(5, signalled(1, SIGTERM), f"all: note: {LEAVES}", "all: stop, SIGTERM, 30 s"),
        step(5, reported(1), f"1: {LEFT}"),
        step(6, joins(1), "1: accept, late", f"all: note: node 1 (n1) has joined; {LATE}"),
        step(6, reported(0)),
        step(6, reported(2), "all: note: going on with 3 nodes: node 0 (n0), node 1 (n1), node 2 (n2)"),
        step(6, None, "all: start attempt 1"),
        step(7, signalled(0, SIGTERM), "1, 2: note: SIGTERM on node 0 (n0)", "all: stop, SIGTERM, 30 s"),
        step(7, reported(0, 1)),
        step(7, reported(1, 1)),
        step(7, reported(2, 1), "all: end, 143"),
    ),
    "a leaving node that is lost is not waited for": (
        job(3, min_nodes=2, max_nodes=3),
        step(5, signalled(1, SIGTERM), f"all: note: {LEAVES}", "all: stop, SIGTERM, 30 s"),
        step(6, reported(0)),
        step(6, reported(2)),
        step(6.5, lost(1), "all: note: going on with 2 nodes: node 0 (n0), node 2 (n2)"),
        step(6.5, None, "all: start attempt 1"),
    ),
    "SIGTERM on one node of a preempted job is for all": (
        job(2, min_nodes=1, max_nodes=2),
        step(
            5,
            noticed(0, SIGUSR2),
            f"all: note: {NOTICED}: ranks have 90 s (--preempt-grace) {SAVE}",
            "all: PreemptRanks",
        ),
        step(6, signalled(1, SIGTERM), "0: note: SIGTERM on node 1 (n1)", "all: stop, SIGTERM, 30 s"),
        step(7, reported(0)),
        step(7, reported(1), "all: end, 143"),
    ),
    "SIGTERM on one node of a job of fixed size is for all": (
        job(2),
        step(6, signalled(1, SIGTERM), "0: note: SIGTERM on node 1 (n1)", "all: stop, SIGTERM, 30 s"),
        step(7, reported(0)),
        step(7, reported(1), "all: end, 143"),
    ),
    "a slow check of a node is noted": (
        job(2, **CHECKED),
        step(0, passed(0)),
        step(4.9, None),
        step(5, None, "all: note: waiting for the check of node 1 (n1)"),
    ),
    "a check that never answers is a bug, and no reason to leave out a machine": (
        job(2, **CHECKED),
        step(0, passed(0)),
        step(24.9, None, "all: note: waiting for the check of node 1 (n1)"),
        step(25, None, f"all: note: the check of node 1 (n1) {START_WITHOUT}", "all: start attempt 0"),
    ),
    "a check that goes on is waited for": (
        job(3, **CHECKED),
        step(24, check_goes_on(1), "all: note: waiting for the check of node 0 (n0), node 1 (n1), node 2 (n2)"),
        step(24, check_goes_on(2)),
        step(24, check_goes_on(0)),
        step(47, passed(0)),
        step(47, check_goes_on(1, 1)),
        step(48, check_goes_on(2)),
        step(49, None, f"all: note: the check of node 1 (n1) {START_WITHOUT}"),
        step(50, passed(2), "all: start attempt 0"),
    ),
    "a check that never answers on the only machine": (
        job(**CHECKED),
        step(25, None, f"0: note: the check of this machine {START_WITHOUT}", "0: start attempt 0"),
    ),
    "a node with a failed check is left out of an elastic job": (
        job(3, min_nodes=2, max_nodes=3, **CHECKED),
        step(0, passed(0)),
        step(0, passed(2)),
        step(
            1, cannot_start(1, FULL), f"0, 2: note: {LEFT_OUT}", f"1: end, 2, error {LEFT_OUT}", "0, 2: start attempt 0"
        ),
        step(2, joins(1), "1: accept, late", f"all: note: node 1 (n1) has joined; {LATE}"),
        step(3, cannot_start(2, "no log"), "all: end, 2, error node 2 (n2): no log"),
    ),
    "too few nodes pass their checks": (
        job(2, max_nodes=3, join_window=1.0, **CHECKED),
        step(
            1,
            None,
            "all: status: 2 of 2 to 3 nodes joined, starting in 1 s unless node 2 joins first",
            "all: CheckNode",
        ),
        step(2, cannot_start(1, FULL), f"all: {FULL_1}; {TOO_FEW}"),
    ),
    "a failed check before a restart": (
        job(2, max_restarts=1, **CHECKED),
        step(0, passed(0)),
        step(0, passed(1), "all: start attempt 0"),
        step(1, failed(0, 0), "all: stop, SIGTERM, 30 s"),
        step(1, reported(0)),
        step(1, reported(1), "all: restart: rank 0 exited with code 1 (on n0); restart 1 of 1"),
        step(1, None, "all: CheckNode"),
        step(
            2, cannot_start(1, FULL), "all: end, 1, rank 0 failed, 0 stopped: no restart: node 1 (n1): /dev/shm is full"
        ),
    ),
    "a node that is lost during its check": (
        job(3, min_nodes=2, max_nodes=3, **CHECKED),
        step(0, passed(0)),
        step(0, passed(2)),
        step(1, lost(1), f"all: note: {LOST_1}", "all: start attempt 0"),
    ),
    "a node that joins during checks is checked too": (
        job(2, max_nodes=3, join_window=0.0, **CHECKED),
        step(0, None, WINDOW, "all: CheckNode"),
        step(1, joins(2), "2: accept", "2: CheckNode"),
        step(1, passed(0)),
        step(1, passed(1)),
        step(2, passed(2), "all: start attempt 0"),
    ),
    "a new node interrupts the ranks after its check": (
        job(max_nodes=2, grow=True, join_window=0.0, **CHECKED),
        step(0, None, "0: CheckNode"),
        step(0, passed(0), "0: start attempt 0"),
        step(1, joins(1), "1: accept, late", "1: CheckNode"),
        step(2, cannot_start(1, FULL), "0: note: node 1 (n1): /dev/shm is full; it does not take part", f"1: {FULL_1}"),
        step(3, joins(1), "1: accept, late", "1: CheckNode"),
        step(
            4,
            passed(1),
            "all: note: node 1 (n1) has joined: stopping the ranks, to start again with it",
            "0: stop, SIGTERM, 30 s",
        ),
        step(5, reported(0, stopped=2), "all: note: going on with 2 nodes: node 0 (n0), node 1 (n1)"),
        step(5, None, "all: CheckNode"),
        step(6, passed(0, 1)),
        step(6, passed(1, 1), "all: start attempt 1"),
    ),
    "the check of a new node fails while the others wait for a restart": (
        job(max_nodes=2, grow=True, max_restarts=1, restart_backoff=5.0, join_window=0.0, **CHECKED),
        step(0, None, "0: CheckNode"),
        step(0, passed(0), "0: start attempt 0"),
        step(1, joins(1), "1: accept, late", "1: CheckNode"),
        step(2, failed(0, 0), "0: stop, SIGTERM, 30 s"),
        step(2, reported(0), "all: restart: rank 0 exited with code 1 (on n0); restart 1 of 1 in 5 s"),
        step(3, cannot_start(1, FULL), f"0: note: {LEFT_OUT}", f"1: end, 2, error {LEFT_OUT}"),
        step(7, None, "0: CheckNode"),
        step(7, passed(0, 1), "0: start attempt 1"),
    ),
    "a lost node and a failed check of another": (
        job(3, min_nodes=2, max_nodes=3, **CHECKED),
        step(0, passed(0)),
        step(0, passed(1)),
        step(0, passed(2), "all: start attempt 0"),
        step(1, lost(1), "0: NodeLost", f"all: note: {LOST_1}; stopping the others", "all: stop, SIGTERM, 30 s"),
        step(1, reported(0)),
        step(1, reported(2), "all: note: going on with 2 nodes: node 0 (n0), node 2 (n2)"),
        step(1, None, "all: CheckNode"),
        step(2, cannot_start(2, FULL), f"all: end, 69: no restart: node 2 (n2): /dev/shm is full; {TOO_FEW}"),
    ),
    "an interrupt ends the checks": (
        job(2, **CHECKED),
        step(1, signalled(1, SIGINT), "0: note: Ctrl-C on node 1 (n1)", "all: end, 130"),
    ),
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES.keys())
def test_history(history: History) -> None:
    replay(history)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("membership changes are counted", [(0, None, LOST_1), (1, 69, "node 2 (n2) was lost: it went")]),
        (
            "a lost node is replaced when another joins: --grow",
            [(0, None, "node 1 (n1) was lost: no heartbeat for 15.0 s"), (1, None, "")],
        ),
        (
            "SIGTERM takes one node out of an elastic job",
            [(0, None, "node 1 (n1) has left: SIGTERM"), (1, 143, "")],
        ),
        ("an interrupt ends the checks", []),
    ],
)
def test_observers_see_how_each_attempt_has_ended(name: str, ends: list[tuple[int, int | None, str]]) -> None:
    """Also of one that only a change of the nodes has ended."""
    found = replay(HISTORIES[name]).attempt_ends
    assert [(attempt, code, why.partition(";")[0]) for attempt, code, why in found] == ends
