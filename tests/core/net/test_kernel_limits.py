"""Tests of warnings about kernel limits on node 0 of a job of many nodes."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from ddplaunch.system.network.kernel_limits import describe_low_limits
from tests.conftest import free_port, wait_until, write_program
from tests.start_modes import LIGHT

ENOUGH = {
    "core/somaxconn": 4096,
    "ipv4/tcp_syncookies": 1,
    "ipv4/tcp_max_syn_backlog": 512,
    "ipv4/neigh/default/gc_thresh3": 4096,
}
NEED = "needs 2128"


def settings(folder: Path, **changed: int) -> str:
    for name, value in ENOUGH.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{changed.get(path.name, value)}\n")
    return str(folder)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"somaxconn": 128}, [f"net.core.somaxconn: 128, {NEED}"]),
        ({"tcp_syncookies": 0}, [f"net.ipv4.tcp_max_syn_backlog: 512, {NEED}"]),
        ({"gc_thresh3": 1024}, [f"net.ipv4.neigh.default.gc_thresh3: 1024, {NEED}"]),
        (
            {"somaxconn": 128, "gc_thresh3": 1024},
            ["net.core.somaxconn: 128", "net.ipv4.neigh.default.gc_thresh3: 1024"],
        ),
    ],
)
def test_low_kernel_limits_are_listed(tmp_path, monkeypatch, changed, expected):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (9999, 9999))
    text = describe_low_limits(2000, settings(tmp_path, **changed))
    lines = (text or "").splitlines()[1:]
    assert [line.strip().startswith(each) for line, each in zip(lines, expected, strict=True)] == [True] * len(expected)
    assert describe_low_limits(999, str(tmp_path)) is None


def test_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1500))
    assert f"open files (ulimit -Hn): 1500, {NEED}" in (describe_low_limits(2000, settings(tmp_path)) or "")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, resource.RLIM_INFINITY))
    assert describe_low_limits(2000, settings(tmp_path)) is None


def test_unreadable_kernel_limits_are_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (9999, 9999))
    assert describe_low_limits(2000, str(tmp_path)) is None


@pytest.mark.skipif(describe_low_limits(60_000) is None, reason="this kernel's limits are high enough for 60,000 nodes")
def test_low_kernel_limits_are_shown_before_nodes_join(start_ddplaunch, tmp_path):
    write_program(tmp_path, "train.py", "")
    where = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--node-rank", "0", "--nproc", "1")
    job = start_ddplaunch("run", *LIGHT, "--nnodes", "60000", *where, "train.py")
    wait_until(lambda: "1/60000 nodes joined" in job.stderr(), "the wait")
    output = job.stderr()
    assert output.index("limits of this machine are too low for node 0") < output.index("1/60000 nodes joined")
    job.signal(signal.SIGINT)
    assert job.wait() == 130
