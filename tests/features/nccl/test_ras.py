"""Tests of what NCCL's RAS service replies, by replies built from its documentation and source, and a fake service."""

import time

import pytest

from ddplaunch.features.nccl.ras_client import ask_service, find_address
from ddplaunch.features.nccl.ras_report import RasMember, compare, is_of_job, parse_reply
from ddplaunch.observe.diagnosis.inspection import (
    Collective,
    Group,
    GroupState,
    Inspection,
    ProcessCondition,
    RankInspection,
)
from tests.features.nccl import replies
from tests.features.nccl.fake_ras import SILENT, serve
from tests.scaled_timeouts import scaled_timeout

ACKNOWLEDGED = b"SERVER PROTOCOL 2\nOK\nERROR: Unknown command SET FORMAT json\n"


def read(text, head=ACKNOWLEDGED):
    return parse_reply(head + text.encode())


def inspect(world_size, *absent, pid=100):
    """All ranks wait in their second all_reduce, but these."""
    ranks = []
    for rank in range(world_size):
        entered = 1 if rank in absent else 2
        last = Collective("0", entered, "all_reduce", "float32[6]", 600, 1000.0, rank in absent, True)
        ranks.append(
            RankInspection(
                rank, "n0", pid + rank, ProcessCondition.ALIVE, answers=True, groups=(GroupState("0", entered, 1),),
                last=(last,), known=(Group("0", "default_pg", tuple(range(world_size))),),
            )
        )  # fmt: skip
    return Inspection(1010.0, tuple(ranks), world_size)


def test_a_healthy_job():
    report = read(replies.HEALTHY)
    assert (report.missing, report.behind, report.processes) == ((), (), 32)
    assert compare(report, inspect(32, 3)).endswith("all ranks reply, and have launched equally many collectives")


@pytest.mark.parametrize("reply", [replies.STOPPED, replies.DEAD])
def test_a_rank_that_does_not_reply(reply):
    report = read(reply)
    assert RasMember(3487984, "172.16.64.213") in report.missing
    assert any((each.rank, each.size) == (21, 32) for each in report.missing)
    assert compare(report, inspect(32, 21)) == "NCCL's RAS service agrees: no reply from rank 21"
    expected = "NCCL's RAS service differs from that: no reply from rank 21; the others wait for rank 5"
    assert compare(report, inspect(32, 5)) == expected


def test_a_process_that_is_no_rank_of_ours():
    """A smaller communicator's numbers are its own: the process is named."""
    text = replies.STOPPED.replace("32        32   RUNNING", " 8        32   RUNNING")
    expected = "NCCL's RAS service: no reply from process 3487984 on 172.16.64.213"
    assert compare(read(text), inspect(32, 5)) == expected
    by_pid = inspect(32, 5, pid=3487984 - 5)
    assert compare(read(text), by_pid) == "NCCL's RAS service agrees: no reply from rank 5"


def test_ranks_that_are_behind():
    report = read(replies.BEHIND)
    expected = "NCCL's RAS service agrees: ranks 0, 2 have launched 6649 collectives, others 6650"
    assert compare(report, inspect(32, 0, 2)) == expected
    report = read(replies.BEHIND_BY_OPERATION)
    assert compare(report, inspect(32, 9)) == "NCCL's RAS service agrees: rank 9 has launched 0 AllReduce, others 6650"


def test_communicators_that_end_are_no_finding():
    report = read(replies.ENDING)
    assert (report.missing, report.behind) == ((), ())


def test_json():
    report = read(replies.make_json({0: (100, 7), 2: (102, 7)}, missing={1: 101}), b"SERVER PROTOCOL 2\nOK\nOK\n")
    assert report.is_json
    assert report.pids == {100, 101, 102}
    assert compare(report, inspect(3, 1)) == "NCCL's RAS service agrees: no reply from rank 1"
    report = read(replies.make_json({0: (100, 7), 1: (101, 6), 2: (102, 7)}))
    assert compare(report, inspect(3, 1)) == "NCCL's RAS service agrees: rank 1 has launched 6 AllReduce, others 7"


@pytest.mark.parametrize(
    "reply", [b"", b"HTTP/1.1 400 Bad\r\n\r\n", b"SERVER PROTOCOL 2\nOK\n{", b'SERVER PROTOCOL 2\n{"communicators": 3}']
)  # fmt: skip
def test_another_program_on_that_port(reply):
    with pytest.raises(ValueError, match="RAS service"):
        parse_reply(reply)


def test_whose_job_it_is():
    ours = read(replies.make_json({0: (100, 7), 1: (101, 7)}))
    assert is_of_job(ours, [101], 2)
    assert not is_of_job(ours, [200, 201], 2)
    assert is_of_job(read(replies.HEALTHY), [200], 32), "text that names no process: by their number"
    assert not is_of_job(read(replies.HEALTHY), [200], 4)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("localhost", 28028)),
        ({"NCCL_RAS_ADDR": "10.0.0.1:4000"}, ("10.0.0.1", 4000)),
        ({"NCCL_RAS_ADDR": "[::1]:4000"}, ("::1", 4000)),
        ({"NCCL_RAS_ADDR": "nonsense"}, None),
        ({"NCCL_RAS_ENABLE": "0"}, None),
    ],
)
def test_the_address(environ, expected):
    assert find_address(environ) == expected


def ask(address, pids, timeout_s=5.0):
    host, port = address.split(":")
    deadline = time.monotonic() + scaled_timeout(timeout_s)
    return ask_service((host, int(port)), deadline, lambda report: is_of_job(report, pids, 32))


def test_a_service_with_json():
    with serve(replies.make_json({0: (100, 7)}, {1: 101})) as (address, seen):
        report = ask(address, [100])
    assert report is not None
    assert report.is_json
    assert seen == ["client protocol 2", "timeout 1", "set format json", "verbose status"]


def test_a_service_before_json():
    with serve(replies.STOPPED, has_json=False) as (address, _):
        report = ask(address, [3487984])
    assert report is not None
    assert not report.is_json
    assert len(report.missing) == 2
    assert report.text.startswith("NCCL version 2.27.3")


def test_processes_that_share_the_port():
    """One that is stopped does not reply, and one of another job is not ours: the next connection finds another."""
    ours = replies.make_json({0: (100, 7)})
    with serve(SILENT, replies.make_json({0: (999, 1)}), ours) as (address, _):
        report = ask(address, [100])
    assert report is not None
    assert report.pids == {100}


def test_no_service_and_one_that_never_ends():
    with serve(replies.make_json({0: (999, 1)})) as (address, _):
        assert ask(address, [100]) is None
    assert ask(address, [100]) is None
