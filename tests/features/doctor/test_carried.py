"""Tests of measuring a connection between two virtual hosts, with each fault injected."""

import json
import subprocess
import sys

import pytest

from ddplaunch.features.doctor.flows import Flow

pytestmark = [pytest.mark.ci, pytest.mark.slow]

LISTENS = """
from ddplaunch.features.doctor.connectivity import TestListener
print(TestListener((), "0" * 16).listening.any_port, flush=True)
input()
"""
MEASURES = """
import json, sys
from msgspec.structs import asdict
from ddplaunch.features.doctor.connectivity import measure_ping, measure_stream
place = sys.argv[1], int(sys.argv[2])
pinged = measure_ping(place, "0" * 16)
found = [asdict(pinged), None]
if pinged.lost < 3:
    found[1] = asdict(max((measure_stream(place, "0" * 16) for _ in range(3)), key=lambda each: each.rate or 0))
print(json.dumps(found))
"""


@pytest.fixture
def carried(network):
    """What goes from one host to another, after a fault."""
    one, other = network(2).hosts
    listener = other.start([sys.executable, "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    port = listener.stdout.readline().strip()

    def measure(fault, *values):
        getattr(other, fault)(*values)
        pinged, streamed = json.loads(one.run(sys.executable, "-c", MEASURES, other.address, port))
        other.heal()
        return Flow(0, 1, 10_000, **pinged, **(streamed or {}))

    return measure


def test_each_fault_is_the_only_one(carried):
    for percent in (3, 30):
        flow = carried("loss", percent)
        assert flow.faults == ("lossy",), flow
        assert flow.sent < 100 or 0.5 < 100 * flow.lost / flow.sent / percent < 2
    for rate in (1, 50):
        flow = carried("narrow", f"{rate}mbit")
        assert flow.faults == ("slow",), flow
        assert 0.5 < flow.rate * 8 / 1e6 / rate < 2
    flow = carried("delay", 30)
    assert flow.faults == ("far",), flow
    assert 0.06 <= flow.seconds < 0.1


def test_a_sound_way_has_none(carried):
    """Beside other work, too: the kernel reports what was lost, and how long the bytes were under way."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        found = [carried("heal") for _ in range(5)]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert [flow.faults for flow in found] == [()] * 5, found
