"""Tests of ``python -m tests.gpu_check`` without a GPU: what is cheap runs in the simulation, and says what is left."""

import json
import sys

import pytest

from tests.conftest import run_command
from tests.fake_nvml import fake_nvml as fake_nvml
from tests.gpu_check.__main__ import make_table
from tests.gpu_check.harness import CHECKS, FAILED, NEEDS_GPU, NO_TIME, PASSED, Check, NeedsGpu, run_checks


def test_the_quick_checks_in_the_simulation(tmp_path):
    command = (sys.executable, "-m", "tests.gpu_check", "--simulate", "--quick", "--out", tmp_path)
    done = run_command(command, env={"PYTHONPATH": "."}, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu_check-all.json").read_text())["checks"]
    assert len(results) == 4
    assert {each["outcome"] for each in results} == {PASSED, NEEDS_GPU}
    (devices,) = [each for each in results if each["name"] == "devices"]
    assert devices["detail"] == "CUDA's list; NVML is simulated: NVIDIA H100 80GB HBM3"


def test_there_are_checks_of_each_kind():
    counts = {group: sum(each.group == group for each in CHECKS) for group in {each.group for each in CHECKS}}
    assert counts.keys() == {"start", "end", "explained", "seen", "fidelity"}
    assert sum(counts.values()) >= 30
    assert {each.group for each in CHECKS if each.part == 1} == {"start", "end", "fidelity"}
    assert len({(each.group, each.name) for each in CHECKS}) == len(CHECKS)


def measure(machine):
    return "1.2 s"


def begin_cuda(machine):
    machine.begin_cuda("the kernel")


def fail(machine):
    raise AssertionError("3 MiB are left")


def end_pytest(machine):
    pytest.fail("it ended")


@pytest.mark.parametrize(
    ("run", "simulated", "outcome", "detail"),
    [
        (measure, True, PASSED, "1.2 s"),
        (begin_cuda, True, NEEDS_GPU, "the kernel"),
        (begin_cuda, False, PASSED, ""),
        (fail, True, FAILED, "AssertionError: 3 MiB are left"),
        (end_pytest, True, FAILED, "Failed: it ended"),
    ],
)
def test_what_comes_of_a_check(fake_nvml, run, simulated, outcome, detail):
    one = Check("start", "one", 1, "One", run, True)
    (result,) = run_checks([one], fake_nvml, 60, is_simulated=simulated)
    assert (result.outcome, result.detail) == (outcome, detail)
    (late,) = run_checks([one], fake_nvml, 0, is_simulated=simulated)
    assert late.outcome == NO_TIME
    assert issubclass(NeedsGpu, Exception)


def test_the_table_for_the_docs(tmp_path):
    machine = {
        "card": "NVIDIA H200",
        "driver": "575.1",
        "cuda": "13.0",
        "nccl": "2.30.3",
        "torch": "2.13.0",
        "cpus": 16,
    }
    one = {"group": "start", "name": "one", "title": "1 rank", "outcome": PASSED, "seconds": 3.0, "detail": "1.2\ns"}
    path = tmp_path / "1.json"
    path.write_text(json.dumps({"machine": machine, "taken": "2026-11-29", "checks": [one]}))
    assert make_table([path]).splitlines() == [
        "NVIDIA H200, driver 575.1, CUDA 13.0, NCCL 2.30.3, torch 2.13.0, 16 CPUs, 2026-11-29:",
        "",
        "| | check | result | measured, or left |",
        "|---|---|---|---|",
        "| start | 1 rank | passed | 1.2 s |",
    ]
