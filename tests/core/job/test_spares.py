"""Tests of ``--spares``: more nodes join than run, and one replaces each node that is lost or fails."""

from __future__ import annotations

import signal
import time

import pytest

from ddplaunch.core import messages
from tests.core.job.job_steps import CHECKED, LEAVES, Job, joined, notes_of

JOINED = "has joined as a spare"


def started(job: Job) -> list[int]:
    """The nodes that have just been sent StartAttempt, in the order of their ranks; their places are checked."""
    starts = [(number, message) for number, message in job.sent if isinstance(message, messages.StartAttempt)]
    job.take(messages.StartAttempt)
    places = [message.assignment for _, message in starts if message.assignment]
    assert [place.node_rank for place in places] == list(range(len(starts)))
    assert all(place.world_size == 2 * len(starts) for place in places)
    return [number for number, _ in starts]


def spared(nodes: int = 3, spares: int = 2, **rules: object) -> Job:
    """All nodes have joined, and the first attempt runs."""
    job = joined(*range(1, nodes + spares), min_nodes=nodes, max_nodes=nodes + spares, spares=spares, **rules)
    assert started(job) == list(range(nodes))
    assert notes_of(job)[-1].startswith(f"waiting as spare{'s' if spares > 1 else ''}: node {nodes} ")
    return job


def lose(job: Job, number: int, *others: int, attempt: int = 0) -> None:
    job.lose(number)
    for other in others:
        job.drain(other, attempt=attempt)
    job.wait(0)


def fail(job: Job, number: int, rank: int, *others: int, attempt: int = 0) -> None:
    failure = job.fail(number, rank, attempt, message=f"RuntimeError: {attempt}")
    job.drain(number, failure, attempt=attempt)
    for other in others:
        job.drain(other, attempt=attempt)
    job.wait(0)


def test_all_join_and_as_many_run_as_the_job_needs():
    job = joined(1, 2, min_nodes=2, max_nodes=4, spares=2)
    assert started(job) == []
    job.join(3)
    assert started(job) == [0, 1]
    assert notes_of(job) == ["waiting as spares: node 2 (n2), node 3 (n3)"]


def test_a_job_starts_without_the_spares_that_do_not_come():
    job = joined(1, min_nodes=2, max_nodes=4, spares=2, join_window=30)
    job.wait(29)
    assert started(job) == []
    job.wait(2)
    assert started(job) == [0, 1]
    job.join(3)
    assert notes_of(job)[-1] == f"node 3 (n3) {JOINED}"
    lose(job, 1, 0)
    assert started(job) == [0, 3]


def test_a_spare_takes_the_place_of_a_lost_node_and_the_others_keep_theirs():
    job = spared()
    lose(job, 1, 0, 2)
    assert started(job) == [0, 3, 2]
    assert notes_of(job) == [
        "node 1 (n1) was lost: its connection closed; stopping the others",
        "going on with 3 nodes: node 0 (n0), node 3 (n3), node 2 (n2)",
        "node 3 (n3) takes the place of node 1 (n1)",
    ]
    job.drain(0, attempt=1)
    job.drain(3, attempt=1)
    job.drain(2, attempt=1)
    assert job.outcome(0).outcome.code == 0
    assert job.outcome(4).outcome.code == 0, "a spare that never ran ends with the others"


def test_two_nodes_lost_at_once_are_two_lines():
    job = spared(3, 2)
    job.lose(2, "no heartbeat for 15.0 s", 15.0)
    lose(job, 1, 0)
    assert notes_of(job)[:2] == [
        "node 2 (n2) was lost: no heartbeat for 15.0 s; stopping the others",
        "node 1 (n1) was lost: its connection closed",
    ]
    assert started(job) == [0, 3, 4]


def test_a_job_ends_when_no_spare_is_left():
    job = spared(2, 1)
    lose(job, 1, 0)
    assert started(job) == [0, 2]
    lose(job, 2, 0, attempt=1)
    outcome = job.outcome(0).outcome
    assert outcome.code == 69
    assert outcome.remark == "node 2 (n2) was lost: its connection closed; 1 of at least 2 nodes are left"


def test_a_node_that_failed_rests_and_may_come_again():
    job = spared(3, 1, max_restarts=5)
    fail(job, 1, 2, 0, 2)
    assert started(job) == [0, 3, 2]
    assert notes_of(job)[-1] == "node 3 (n3) takes the place of node 1 (n1)"
    fail(job, 2, 4, 0, 3, attempt=1)
    assert started(job) == [0, 3, 1], "it has failed once only, and there is no other"


def test_a_node_that_failed_twice_is_not_taken_again():
    job = spared(2, 1, max_restarts=5, restart_on="always", min_uptime=0.0)
    fail(job, 1, 2, 0)
    assert started(job) == [0, 2]
    fail(job, 2, 2, 0, attempt=1)
    assert started(job) == [0, 1]
    job.take(messages.NoteMessage)
    fail(job, 1, 2, 0, attempt=2)
    assert notes_of(job)[0] == "node 1 (n1) failed 2 times and is excluded from now on"
    assert started(job) == [0, 2]
    fail(job, 2, 2, 0, attempt=3)
    outcome = job.outcome(0).outcome
    assert (outcome.code, outcome.remark) == (3, "1 of at least 2 nodes are left to start again")


def test_a_machine_that_was_lost_twice_gets_no_ranks_when_it_joins_again():
    job = spared(2, 2)
    lose(job, 1, 0)
    assert started(job) == [0, 2]
    job.join(1)
    assert notes_of(job)[-1] == f"node 1 (n1) {JOINED}"
    lose(job, 2, 0, attempt=1)
    assert started(job) == [0, 1]
    lose(job, 1, 0, attempt=2)
    assert started(job) == [0, 3]
    job.join(1)
    assert notes_of(job)[-1] == "node 1 (n1) has joined but is excluded: it failed 2 times"


def test_a_node_whose_zygote_was_lost_is_replaced():
    job = spared(3, 1, max_restarts=1)
    job.drain(1, broken=messages.LauncherFailure("the zygote (pid 7) was ended by SIGKILL", time.time()))
    job.drain(0)
    job.drain(2)
    job.wait(0)
    assert started(job) == [0, 3, 2]


def test_a_failure_on_node_0_replaces_no_node():
    job = spared(2, 1, max_restarts=1)
    fail(job, 0, 0, 1)
    assert started(job) == [0, 1]


def test_ranks_that_only_saw_what_others_did_put_no_blame_on_their_node():
    job = spared(2, 1, max_restarts=1)
    failure = job.fail(1, 2, message="DistBackendError: NCCL error: remote process exited or there was a network error")
    assert failure.is_secondary
    job.drain(1, failure)
    job.drain(0)
    job.wait(10)
    assert started(job) == [0, 1]


def test_a_lost_spare_changes_nothing():
    job = spared(2, 1)
    job.lose(2)
    assert notes_of(job) == ["node 2 (n2) was lost: its connection closed"]
    assert not job.take(messages.StopAttempt)


def test_with_checks_a_spare_comes_for_a_node_that_is_left_out():
    job = joined(1, 2, min_nodes=2, max_nodes=3, spares=1, options=CHECKED)
    job.send(0, messages.CheckPassed(0))
    job.send(1, messages.NodeStartError("/dev/shm is full", "empty it"))
    job.send(2, messages.CheckPassed(0))
    assert started(job) == [0, 2]
    assert notes_of(job) == ["node 1 (n1) is left out: /dev/shm is full"]


def test_a_range_of_nodes_has_its_most_before_spares_wait():
    job = joined(1, 2, 3, min_nodes=2, max_nodes=4, spares=1)
    assert started(job) == [0, 1, 2]
    lose(job, 1, 0, 2)
    assert started(job) == [0, 3, 2]
    lose(job, 3, 0, 2, attempt=1)
    assert started(job) == [0, 2]


@pytest.mark.parametrize("grow", [False, True])
def test_a_node_that_comes_late_fills_a_free_place(grow):
    job = joined(1, min_nodes=2, max_nodes=4, spares=1, grow=grow, join_window=1)
    job.wait(2)
    assert started(job) == [0, 1]
    job.join(2)
    assert [reply.late for reply in job.replies] == [False, True]
    assert bool(job.take(messages.StopAttempt, 0)) == grow
    if grow:
        job.drain(0)
        job.drain(1)
        job.wait(0)
        assert started(job) == [0, 1, 2]
        job.take(messages.StopAttempt)
        job.join(3)
        assert not job.take(messages.StopAttempt), "there is no place for it"


def test_every_node_must_fit_in_any_place():
    job = Job(min_nodes=2, max_nodes=3, spares=1)
    hello = job.hello(1)
    wide = job.hello(1, node_spec=type(hello.node_spec)(1, "n1", ("cpu",) * 4))
    refused = job.refusal(wide)
    assert refused.message == (
        "the number of ranks differs: node 0 (n0) has 2, node 1 (n1) has 4: "
        "a spare must have as many ranks as every other node"
    )
    other = Job(min_nodes=2, max_nodes=3, spares=1).refusal(job.hello(1, nnodes="2"))
    assert other.message == "--nnodes differs: node 0 (n0) has 2 --spares 1, node 1 (n1) has 2"


def test_no_node_is_compared_with_all_the_others(monkeypatch):
    """Such comparisons took 6 s at 4,000 nodes, before any rank started."""
    from ddplaunch.core.job.node_table import JoinedNode

    def compare(one, other):
        raise AssertionError("two seats are compared")

    monkeypatch.setattr(JoinedNode, "__eq__", compare)
    for spares in (0, 1):
        job = joined(*range(1, 3 + spares), min_nodes=3, max_nodes=3 + spares, spares=spares)
        assert started(job) == [0, 1, 2]


def test_sigterm_on_a_spare_and_on_a_node_with_one():
    job = spared(2, 2)
    job.send(3, messages.StopRequested(signal.SIGTERM))
    assert notes_of(job) == ["node 3 (n3) has left: SIGTERM"]
    assert not job.take(messages.StopAttempt)
    job.send(1, messages.StopRequested(signal.SIGTERM))
    job.drain(1)
    lose(job, 1, 0)
    assert notes_of(job) == [
        LEAVES,
        "going on with 2 nodes: node 0 (n0), node 2 (n2)",
        "node 2 (n2) takes the place of node 1 (n1)",
    ]
    assert started(job) == [0, 2]
