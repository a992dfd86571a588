"""Batch of Google Cloud."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddplaunch.clusters.gcpbatch import find
from ddplaunch.errors import UsageError

TASK = {"BATCH_TASK_INDEX": "1", "BATCH_TASK_COUNT": "2"}


def test_hosts_are_numbered_by_their_place_in_the_file(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    own = os.uname().nodename
    hosts.write_text(f"other-0.c.project.internal\n{own}\n")
    finding = find({**TASK, "BATCH_TASK_INDEX": "0", "BATCH_HOSTS_FILE": str(hosts)})
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.address) == (2, 1, "other-0.c.project.internal")
    hosts.write_text("a\nb\n")
    with pytest.raises(UsageError, match=f"does not have this machine, {own}"):
        find({**TASK, "BATCH_HOSTS_FILE": str(hosts)})
    with pytest.raises(UsageError, match=r"BATCH_TASK_COUNT=3 and BATCH_HOSTS_FILE=\S+ \(hosts: 2\) contradict"):
        find({**TASK, "BATCH_TASK_COUNT": "3", "BATCH_HOSTS_FILE": str(hosts)})


def test_without_the_file_a_task_is_a_job_of_its_own() -> None:
    finding = find(TASK)
    assert finding
    assert (finding.nnodes, finding.is_copy) == (1, True)
    assert finding.notes == ("BATCH_TASK_INDEX=1 without BATCH_HOSTS_FILE: this task is treated as a job of its own",)


def test_one_task_is_one_node_without_a_word() -> None:
    finding = find({"BATCH_TASK_INDEX": "0", "BATCH_TASK_COUNT": "1"})
    assert finding
    assert (finding.nnodes, finding.is_copy, finding.notes) == (1, False, ())
