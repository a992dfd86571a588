"""Nomad."""

from __future__ import annotations

from ddplaunch.clusters.nomad import find


def test_an_allocation_is_a_job_of_its_own() -> None:
    finding = find({"NOMAD_ALLOC_INDEX": "1"})
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.is_copy) == (1, 0, True)
    assert finding.notes == ("NOMAD_ALLOC_INDEX=1 without a count: this allocation is treated as a job of its own",)


def test_nothing_without_it() -> None:
    assert find({"NOMAD_JOB_NAME": "train"}) is None
