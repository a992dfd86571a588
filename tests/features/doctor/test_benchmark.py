"""Tests of a node's process with real benchmark processes: facts, a device and collectives of one rank."""

import os
import signal
from importlib.metadata import version
from typing import Any

import pytest

from ddplaunch.features.doctor.benchmark import COLLECTIVES, SIZES, MeasureCollective, PrepareDevices
from ddplaunch.features.doctor.messages import DescribeNode
from ddplaunch.features.doctor.node_process import RequestHandler
from tests.conftest import free_port

pytestmark = pytest.mark.slow


@pytest.mark.ci
def test_a_device_and_each_collective_over_both_families_of_addresses(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    handler: Any = RequestHandler(by_hand=False)
    facts = handler.handle(DescribeNode(os.fsencode(tmp_path), "localhost", (), "nonce"))
    assert "PYTHONSAFEPATH" not in os.environ
    assert version("torch").startswith(facts.torch.version.partition("+")[0])
    assert (facts.link.loopback, facts.loopback) == (True, None)
    assert facts.folders[0].what == "the current folder"
    prepared = handler.handle(PrepareDevices(("cpu",), ""))
    assert [(each.device, each.flops > 1e6) for each in prepared.powers] == [("cpu", True)]
    kinds = [*((name, "", 0) for name in COLLECTIVES), ("all_reduce", "::1", free_port())]
    for name, address, port in kinds:
        found = handler.handle(MeasureCollective(address, port, 0, 1, 1, name, SIZES[1]))
        assert (len(found.seconds), found.error) == (2, None)
        assert all(0 < seconds < 10 for seconds in found.seconds)
    monkeypatch.setattr(handler, "_prepare_devices", lambda question: None)
    os.kill(handler._benchmarks[0]._child.pid, signal.SIGKILL)
    assert handler.handle(MeasureCollective("", 0, 0, 1, 1)).error == "the process died"
    handler._close_benchmarks()
    assert handler.handle(MeasureCollective("", 0, 0, 1, 1)).error == "the benchmark processes could not be restarted"
