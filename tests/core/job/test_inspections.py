"""Tests of when node 0 inspects all ranks before it stops them, and what follows."""

from __future__ import annotations

import signal
import time

import pytest
from msgspec.structs import replace

from ddplaunch.base.frames import ProtocolError
from ddplaunch.core import messages
from ddplaunch.core.messages import RanksInspected, RpcReply, RpcRequest
from ddplaunch.observe.diagnosis.inspection import (
    Collective,
    Detail,
    GroupState,
    Inspection,
    ProcessCondition,
    RankInspection,
)
from ddplaunch.observe.diagnosis.stack_groups import group_ranks
from ddplaunch.observe.job.inspect_job import BEFORE_STOP_TIMEOUT_S, CRASHES_TOGETHER_S
from ddplaunch.observe.messages import CrashInspected, CrashSeen
from tests.core.job.job_steps import joined


@pytest.fixture
def job():
    """Two nodes with two ranks each, at work."""
    made = joined(1, min_nodes=2, inspect=True)
    made.sent.clear()
    return made


def list_requests(job):
    """The requests to nodes: node rank and message."""
    return [(number, message) for number, message in job.sent if isinstance(message, RpcRequest)]


def stops(job):
    return [number for number, message in job.sent if isinstance(message, messages.StopAttempt)]


def found(serial, *ranks):
    each = tuple(RankInspection(rank, f"n{rank // 2}", 1, ProcessCondition.ALIVE) for rank in ranks)
    return RpcReply(serial, "inspect", Inspection(0.0, each, len(ranks)))


def test_ranks_are_stopped_after_the_inspection_of_all(job):
    job.fail(1, 2)
    assert [number for number, _ in list_requests(job)] == [0, 1]
    assert stops(job) == []
    serial = list_requests(job)[0][1].serial
    job.send(1, found(serial, 2, 3))
    assert stops(job) == []
    job.send(0, found(serial, 0, 1))
    assert stops(job) == [0, 1]
    kept = [(number, message) for number, message in job.sent if isinstance(message, RanksInspected)]
    assert [(number, [rank.rank for rank in each.inspection.ranks]) for number, each in kept] == [(0, [0, 1, 2, 3])]


def test_a_node_that_does_not_answer_is_not_waited_for(job):
    job.fail(1, 2)
    job.wait(BEFORE_STOP_TIMEOUT_S - 0.01)
    assert stops(job) == []
    job.wait(0.02)
    assert stops(job) == [0, 1]
    (kept,) = [message for _, message in job.sent if isinstance(message, RanksInspected)]
    assert kept.inspection.silent == ("node 0 (n0)", "node 1 (n1)")


def test_a_second_ctrl_c_skips_the_inspection(job):
    job.send(1, messages.StopRequested(signal.SIGINT))
    assert list_requests(job)
    assert stops(job) == []
    job.send(1, messages.StopRequested(signal.SIGINT, again=True))
    assert [message.grace_s for _, message in job.sent if isinstance(message, messages.StopAttempt)] == [0.0, 0.0]


def test_preempted_ranks_are_not_inspected(job):
    job.send(0, messages.PreemptionNotice(signal.SIGUSR2))
    job.wait(100)
    assert stops(job)
    assert not list_requests(job)


@pytest.mark.parametrize("rules", [{"grace": 4.0}, {"inspect": False}])
def test_no_inspection_with_a_short_grace(rules):
    job = joined(1, min_nodes=2, **{"inspect": True, **rules})
    job.fail(1, 2)
    assert stops(job) == [0, 1]
    assert not list_requests(job)


def test_secondary_failures_are_inspected_in_more_detail(job):
    job.fail(1, 2, message="RuntimeError: Connection closed by peer")
    assert {message.payload for _, message in list_requests(job)} == {Detail.WAITS}
    job.fail(0, 1, message="ValueError: no such class")
    assert len(list_requests(job)) == 2, "once an attempt"


def test_an_ended_attempt_waits_for_its_inspection(job):
    """The report needs the inspection: it names the rank that the others waited for."""
    for number in (0, 1):
        job.fail(number, 2 * number, message="RuntimeError: Connection closed by peer")
    for number in (0, 1):
        job.send(number, messages.AttemptReport(0, 1, 0.0))
    ends = [message for _, message in job.sent if isinstance(message, messages.EndJob)]
    assert not ends
    for number in (0, 1):
        job.send(number, found(list_requests(job)[0][1].serial, 2 * number, 2 * number + 1))
    assert [message.outcome.code for _, message in job.sent if isinstance(message, messages.EndJob)] == [3, 3]


def test_an_inspection_does_not_wait_for_a_lost_node(job):
    job.fail(0, 0)
    job.send(0, found(list_requests(job)[0][1].serial, 0, 1))
    job.lose(1)
    job.wait(0)
    assert stops(job) == [0]


def test_a_node_that_is_lost_during_an_inspection_is_the_cause(job):
    """The report names the lost node, not the rank whose connection closed because of it."""
    job.fail(0, 0, message="RuntimeError: Connection closed by peer", clock=time.time() + 1)
    job.send(0, found(list_requests(job)[0][1].serial, 0, 1))
    job.send(0, messages.AttemptReport(0, 1, 0.0))
    job.lose(1)
    job.wait(1)
    (outcome,) = [message.outcome for _, message in job.sent if isinstance(message, messages.EndJob)]
    assert outcome.code == 69
    assert "node 1 (n1) was lost" in outcome.remark


def test_each_request_gets_a_reply(job):
    job.send(1, RpcRequest(7, "inspect", 3.0, Detail.STATE))
    serial = list_requests(job)[0][1].serial
    for number in (0, 1):
        job.send(number, found(serial, 2 * number))
    number, answer = job.sent[-1]
    assert (number, answer.serial) == (1, 7)
    assert [rank.rank for rank in answer.payload.ranks] == [0, 2]


def test_a_report_about_ranks_of_another_node_is_a_protocol_error(job):
    job.fail(0, 0)
    with pytest.raises(ProtocolError):
        job.send(1, found(list_requests(job)[0][1].serial, 0))


def inspected(number, moment, idle):
    """The reply of a node at this time of its clock: its ranks have waited for 30 s, except the idle ones."""
    last = Collective("0", 5, "all_reduce", "", 600.0, moment - 30, completed=False, alone=True)
    at_work = RankInspection(0, f"n{number}", 1, ProcessCondition.ALIVE, answers=True, groups=(GroupState("0", 4, 4),))
    waits = replace(at_work, groups=(GroupState("0", 5, 4),), last=(last,))
    ranks = (replace(at_work if rank in idle else waits, rank=rank) for rank in (2 * number, 2 * number + 1))
    return Inspection(moment, tuple(ranks), 4)


def test_waiting_times_do_not_depend_on_the_clocks_of_the_hosts(job):
    job.send(1, RpcRequest(7, "inspect", 3.0, Detail.WAITS))
    serial = list_requests(job)[0][1].serial
    for number, ahead in ((0, 0.0), (1, -300.0)):
        job.send(number, RpcReply(serial, "inspect", inspected(number, time.time() + ahead, idle=[3])))
    groups = group_ranks(job.sent[-1][1].payload)
    assert [(each.ranks, each.waited_s and round(each.waited_s, -1)) for each in groups] == [
        ((3,), None),
        ((0, 1, 2), 30),
    ]


def test_a_report_names_the_hosts_of_all_ranks_that_the_others_waited_for(job):
    job.fail(0, 0, message="RuntimeError: Connection closed by peer")
    serial = list_requests(job)[0][1].serial
    for number in (0, 1):
        job.send(number, RpcReply(serial, "inspect", inspected(number, 100.0, idle=[1, 2])))
        job.send(number, messages.AttemptReport(0, 1, 0.0))
    ends = [message for _, message in job.sent if isinstance(message, messages.EndJob)]
    blame = "ranks 1, 2 did not enter all_reduce #5, which 2 ranks waited for (on n0, n1)"
    assert [each.outcome.verdict.blame for each in ends] == [blame, blame]


def test_a_crashed_rank_ends_after_the_inspection_of_all(job):
    def released():
        return [(number, each.rank, each.text) for number, each in job.sent if isinstance(each, CrashInspected)]

    job.send(1, CrashSeen(0, 2))
    job.send(1, CrashSeen(0, 3))
    requests = list_requests(job)
    assert [(number, each.payload) for number, each in requests] == [(0, Detail.WAITS), (1, Detail.WAITS)]
    assert released() == []
    serial = requests[0][1].serial
    for node, ranks in ((0, (0, 1)), (1, (2, 3))):
        job.send(node, found(serial, *ranks))
    assert released() == [(1, 2, ""), (1, 3, "")]
    job.send(0, CrashSeen(0, 1))
    assert released()[2:] == [(0, 1, "")], "one inspection for those that crash together"
    assert len(list_requests(job)) == 2
    job.wait(CRASHES_TOGETHER_S)  # a worker had crashed, and its rank went on
    job.send(0, CrashSeen(0, 0))
    assert len(list_requests(job)) == 4
    assert stops(job) == []
