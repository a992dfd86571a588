"""Which nodes may join a job, and the node ranks that they get."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ddplaunch.core import messages
from ddplaunch.core.job.job_events import HelloReceived
from ddplaunch.system.plan.node_spec import NodeSpec
from ddplaunch.system.target.versions import Versions
from tests.core.job.job_steps import Job, joined


@pytest.mark.parametrize(
    ("rules", "joining", "count", "remark", "missing"),
    [
        ({"min_nodes": 2}, (), "1/2", "1 of 2", "1"),
        ({"min_nodes": 4}, (1,), "2/4", "2 of 4", "2, 3"),
        ({"min_nodes": 30}, (), "1/30", "1 of 30", "1, 2, 3, 4, 5, 6, 7, 8 and 21 more"),
        ({"min_nodes": 3, "max_nodes": 4}, (1,), "2 of 3 to 4", "2 of at least 3", "2, 3"),
    ],
)
def test_missing_nodes_are_named(rules, joining, count, remark, missing):
    job = Job(**rules, join_timeout=60.0)
    job.wait(0)
    job.join(*joining)
    job.wait(59.9)
    first, *later = job.take(messages.JoinStatus, 0)
    assert (first.joined, len(later)) == (1, len(joining))
    assert [first, *later][-1].describe() == f"{count} nodes joined, waiting for node {missing}"
    job.wait(0.1)
    outcome = job.outcome(0).outcome
    are = "is" if missing == "1" else "are"
    reason = f"only {remark} nodes joined in 60 s (--join-timeout): node {missing} {are} missing"
    assert (outcome.code, outcome.remark.splitlines()[0]) == (69, reason)


VERSIONS = Versions("3.11", "2.13", "12.4", "2.20")
OURS = {"versions": VERSIONS, "gpus": ("H100",)}
"""Of node 0, with which other nodes are compared."""


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"nnodes": "3"}, "--nnodes differs: node 0 (n0) has 2, node 1 (n1) has 3"),
        ({"run_id": "x"}, "the run id differs: node 0 (n0) has none, node 1 (n1) has x"),
        ({"fingerprint": "abd"}, "the content of train.py differs: node 0 (n0) has abc, node 1 (n1) has abd"),
        ({"max_restarts": 2}, "--max-restarts differs: node 0 (n0) has 0, node 1 (n1) has 2"),
        (
            {"versions": replace(VERSIONS, python="3.12")},
            "the Python version differs: node 0 (n0) has 3.11, node 1 (n1)",
        ),
        (
            {"versions": replace(VERSIONS, torch="2.4")},
            "torch's version differs: node 0 (n0) has 2.13, node 1 (n1) has",
        ),
        ({"versions": replace(VERSIONS, cuda=None)}, "of torch differs: node 0 (n0) has 12.4, node 1 (n1) has none"),
        ({"versions": replace(VERSIONS, nccl="2.21")}, "NCCL version differs: node 0 (n0) has 2.20, node 1 (n1) has"),
        ({"gpus": ()}, "the kind of devices differs: node 0 (n0) has H100, node 1 (n1) has CPUs alone"),
        ({"node_spec": NodeSpec(0, "n9", ("cpu",))}, "node rank 0 is used twice: by n0 and by n9"),
        ({"node_spec": NodeSpec(2, "n9", ("cpu",))}, "node rank 2 is out of range: 0 to 1"),
        (
            {"node_spec": NodeSpec(1, "n1", ("cpu",), kind="task")},
            "task 1 (n1) is one rank, but node 0 (n0), alone on its host, starts 2",
        ),
    ],
)
def test_nodes_with_different_settings_end_the_job(changed, expected):
    job = Job(min_nodes=2)
    job.start(job.hello(0, **OURS))
    assert expected in job.refusal(job.hello(1, **{**OURS, **changed})).message
    outcome = job.outcome(0).outcome
    assert outcome.code == 2
    assert expected in outcome.usage_error[0]


@pytest.mark.parametrize(
    ("ours", "theirs", "note"),
    [
        ({}, {}, None),
        ({}, {"gpus": ("A100", "V100")}, "the GPU model differs: node 0 (n0) has H100, node 1 (n1) has A100 and V100"),
        ({"gpus": ()}, {"gpus": ()}, None),
        ({}, {"fingerprint": None}, None),
        ({}, {"versions": Versions("3.11", cuda="12.1")}, None),
        ({}, {"versions": replace(VERSIONS, nccl=None)}, None),
        ({"node_spec": NodeSpec(0, "n0", ("cpu",))}, {"node_spec": NodeSpec(1, "n1", ("cpu",), kind="task")}, None),
    ],
)
def test_what_may_differ_between_nodes(ours, theirs, note):
    """A value that one of the nodes does not know may differ too."""
    job = Job(min_nodes=2)
    job.start(job.hello(0, **{**OURS, **ours}))
    job.admit(job.hello(1, **{**OURS, **theirs}))
    slow = ": the slower ones set the pace"
    assert [each.text for each in job.take(messages.NoteMessage, 1)] == ([note + slow] if note else [])


def test_mismatched_versions_can_be_allowed():
    job = Job(min_nodes=2, allow_mismatch=True)
    hello = job.hello(1, versions=Versions("3.12", "2.4"))
    job.admit(hello)
    assert [note.text for note in job.take(messages.NoteMessage, 1)] == [
        "the Python version differs: node 0 (n0) has 3.11, node 1 (n1) has 3.12",
        "torch's version differs: node 0 (n0) has 2.13, node 1 (n1) has 2.4",
    ]


@pytest.mark.parametrize(
    ("joining", "run_id", "refused", "note", "code"),
    [
        (False, None, "node 1 (n1): no torch", None, 2),
        (False, "x", "this is another job", None, None),
        (True, None, "node 1 (n1): no torch", "node 1 (n1): no torch; it does not take part", None),
        (True, "x", "this is another job", None, None),
    ],
)
def test_a_node_that_cannot_join(joining, run_id, refused, note, code):
    """It ends the job that waits for it, but no job that runs without it."""
    job = Job(min_nodes=1 if joining else 2, max_nodes=2, join_window=0.0)
    job.wait(0)
    job.on(HelloReceived(0, messages.JoinDeclined(1, "n1", "no torch", None, run_id)))
    (refusal,) = job.replies
    assert refusal.refusal.message == refused
    assert [each.text for each in job.take(messages.NoteMessage)] == ([note] if note else [])
    assert [end.outcome.code for end in job.take(messages.EndJob)] == ([code] if code else [])


def test_nodes_without_a_rank_get_the_lowest_that_is_free():
    job = Job(min_nodes=4, max_nodes=4)
    asking = [job.hello(1, node_spec=NodeSpec(1, host, ("cpu",)), has_node_rank=False) for host in ("a", "b", "c")]
    given = []
    for hello in asking:
        admitted = job.admit(hello)
        given.append((admitted.node_spec.node_rank, admitted.node_spec.host))
    assert given == [(1, "a"), (2, "b"), (3, "c")]
    assert job.refusal(asking[0]).message == "the job is running already, without this a"


def test_a_node_that_joins_again_keeps_its_node_rank():
    for wanted, given in ((3, 3), (1, 1), (2, 1), (4, 1)):
        job = joined(1, 2, min_nodes=2, max_nodes=4, join_window=60.0)
        job.lose(1)
        assert job.admit(job.hello(wanted, has_node_rank=False)).node_spec.node_rank == given
    assert "node rank 2 is used twice" in job.refusal(job.hello(2)).message, "a typed one stands"


def test_more_nodes_than_the_maximum_are_refused():
    job = joined(1, min_nodes=1, max_nodes=2)
    assert job.refusal(job.hello(1, has_node_rank=False)).message == "all 2 nodes of the job have joined already"
    assert job.refusal(job.hello(2)).message.startswith("node rank 2 is out of range")
