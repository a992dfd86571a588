"""Tests that a job which was given GPUs, or asked for them, does not start on CPUs by mistake."""

from __future__ import annotations

import json

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.system.devices.machine import check_expected_gpus
from ddplaunch.system.devices.visible_gpus import visible_gpus
from ddplaunch.system.plan.hardware import Hardware
from ddplaunch.system.plan.planner import PlanSpec
from tests.conftest import free_port, write_program
from tests.core.job.test_joining import HELLO
from tests.fake_nvml import DRIVER_NOT_LOADED, LIBRARY_MISMATCH, FakeNvml, without_gpus
from tests.system.devices.test_visible import machine

GIVEN = {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.mark.parametrize(
    ("error", "text", "nproc"),
    [
        (DRIVER_NOT_LOADED, "Driver Not Loaded; load it", ()),
        (LIBRARY_MISMATCH, "version mismatch; it", ("--nproc", "4")),
    ],
)
def test_a_driver_that_fails_under_slurm(run_in_fork, tmp_path, fake_nvml: FakeNvml, error, text, nproc) -> None:
    write_program(tmp_path, "train.py", "print('trained')")
    done = run_in_fork("run", *nproc, "train.py", env=fake_nvml.environ(4, init_error=error) | GIVEN)
    assert (done.returncode, done.stdout) == (2, "")
    first, why, instead = done.stderr.splitlines()
    assert first == "Error: SLURM_GPUS_ON_NODE=4, but no GPU of this machine works"
    assert text in why
    assert instead.startswith("  --gpus none ")


def test_a_dry_run_for_other_hosts_ignores_the_gpus_here(run_in_fork, tmp_path) -> None:
    write_program(tmp_path, "train.py", "")
    assert run_in_fork("run", "--hosts", "n1:2,n2:2", "--dry-run", "train.py", env=GIVEN).returncode == 0


@without_gpus
def test_expected_gpus_without_the_nvidia_library(run_in_fork, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    write_program(tmp_path, "train.py", "")
    for variables in GIVEN, {"SM_NUM_GPUS": "8"}, {"NVIDIA_VISIBLE_DEVICES": "GPU-fa4e0000-0000"}:
        done = run_in_fork("run", "train.py", env=variables)
        assert done.returncode == 2, variables
        assert done.stderr.startswith(f"Error: {next(iter(variables))}={next(iter(variables.values()))}, but no GPU")
    text = run_in_fork("devices", env=GIVEN).stdout
    assert "SLURM_GPUS_ON_NODE=4, but no GPU works: jobs will run on CPUs only with --gpus none.\n" in text


@pytest.mark.parametrize("words", ["--gpus none", "--nproc cpu"])
def test_options_for_cpus_are_accepted_without_gpus(run_in_fork, tmp_path, fake_nvml: FakeNvml, words: str) -> None:
    write_program(tmp_path, "train.py", "")
    environ = fake_nvml.environ(4, init_error=DRIVER_NOT_LOADED) | GIVEN
    done = run_in_fork("run", "--dry-run", "--json", *words.split(), "train.py", env=environ)
    assert json.loads(done.stdout)["ranks"][0]["env"]["DDPLAUNCH_DEVICE"] == "cpu", done.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [("--backend nccl", "--backend nccl needs GPUs"), ("--nproc gpu", "--nproc gpu counts GPUs")],
)
def test_gpu_options_are_refused_with_the_error_of_the_driver(
    run_in_fork, tmp_path, fake_nvml: FakeNvml, options, text
) -> None:
    write_program(tmp_path, "train.py", "")
    done = run_in_fork("run", *options.split(), "train.py", env=fake_nvml.environ(4, init_error=DRIVER_NOT_LOADED))
    assert done.returncode == 2
    assert done.stderr.startswith(f"Error: {text}, but no GPU")


def test_device_files_and_masks_that_hide_all_gpus() -> None:
    hardware = Hardware(machine([]).cpu, notes=("The driver says why.",), gpu_evidence="/dev/nvidia0 is there")

    def check(environ, **typed) -> None:
        visible = visible_gpus(hardware, typed.get("gpus"), environ)
        check_expected_gpus(hardware, visible, environ, PlanSpec(**typed))

    with pytest.raises(UsageError, match="/dev/nvidia0 is there, but no GPU") as raised:
        check({}, nproc="4")
    assert raised.value.hint == "The driver says why.\n--gpus none runs the job on CPUs"
    check({}, gpus="none")
    for mask in "", "-1", "NoDevFiles":
        check({"CUDA_VISIBLE_DEVICES": mask, "SLURM_GPUS_ON_NODE": "4"})


@pytest.mark.ci
def test_a_node_without_gpus_joins_none_that_has_some(start_ddplaunch, tmp_path, fake_nvml: FakeNvml) -> None:
    write_program(tmp_path, "hello.py", HELLO)
    for allowed in False, True:
        nodes = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--start", "exec")
        options = ("run", *nodes, *(["--allow-mismatch"] * allowed))
        first = start_ddplaunch(*options, "--node-rank", "0", "hello.py", env=fake_nvml.environ(2))
        second = start_ddplaunch(*options, "--node-rank", "1", "hello.py", env={"CUDA_VISIBLE_DEVICES": ""})
        assert (first.wait(), second.wait()) == ((0, 0) if allowed else (2, 2)), first.stderr()
        for node in first, second:
            assert "the kind of devices differs: node 0" in node.stderr()
            assert "has CPUs alone" in node.stderr()
            assert ("--gpus none on every node runs on CPUs, or --allow-mismatch" in node.stderr()) is not allowed
