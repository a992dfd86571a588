"""Tests of a process that measures a device and collectives, with one rank."""

import json
import subprocess
import sys

import msgspec
import pytest

from ddplaunch.features.doctor.benchmark import COLLECTIVES, SIZES, MeasureCollective, PrepareDevices
from ddplaunch.features.doctor.node_process import _BENCHMARK_STATEMENT
from tests.conftest import free_port

pytestmark = pytest.mark.slow


def test_a_device_and_each_collective_over_both_families_of_addresses():
    kinds = [*((name, "127.0.0.1") for name in COLLECTIVES), ("all_reduce", "::1")]
    tasks = [MeasureCollective(address, free_port(), 0, 1, 1, name, SIZES[1]) for name, address in kinds]
    lines = b"".join(msgspec.json.encode(each) + b"\n" for each in (PrepareDevices(("cpu",), ""), *tasks))
    words = [sys.executable, "-c", _BENCHMARK_STATEMENT]
    done = subprocess.run(words, input=lines, capture_output=True, check=True)
    begun, _, device, *measured = map(json.loads, done.stdout.splitlines())
    assert (begun, device["device"], device["flops"] > 1e6) == ("begun", "cpu", True)
    assert [(len(each["seconds"]), each.get("error")) for each in measured] == [(2, None)] * len(kinds)
    assert all(0 < seconds < 10 for each in measured for seconds in each["seconds"])
