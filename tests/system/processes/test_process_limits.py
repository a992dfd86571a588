"""Tests of what is said about the limit that was reached."""

import errno
import resource

import pytest

from ddplaunch.system.devices import cgroups
from ddplaunch.system.processes import process_limits


@pytest.mark.parametrize(
    ("limit", "used", "reached"),
    [
        ("8", "8", "the limit of the cgroup is 8 (pids.max)"),
        ("8", "7", "the limit of the cgroup is 8 (pids.max)"),  # a process has ended since
        ("8", "6", "the limit of the cgroup (pids.max), the user (ulimit -u) or the machine is reached"),
        ("max", "8", "the limit of the cgroup (pids.max), the user (ulimit -u) or the machine is reached"),
    ],
)
def test_a_control_group_that_is_full_or_nearly_so_is_named(tmp_path, monkeypatch, limit, used, reached):
    (tmp_path / "pids.max").write_text(f"{limit}\n")
    (tmp_path / "pids.current").write_text(f"{used}\n")
    monkeypatch.setattr(cgroups, "list_cgroup_dirs", lambda controller: [str(tmp_path)])
    monkeypatch.setattr(process_limits, "read_rlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert process_limits.describe_spawn_error(errno.EAGAIN) == f"too many processes: {reached}"
