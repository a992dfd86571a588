"""Tests of what torch documents for torchrun's workers, and of its parts that depend on the launcher."""

import os

import pytest

from tests.conftest import clean_environment
from tests.frameworks.launchers import PROGRAMS, TIMEOUT_S, reports

pytestmark = [pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(3 * TIMEOUT_S)]


def test_every_documented_variable_is_as_under_torchrun(launchers):
    before = {"SET_BEFORE": " ".join([*clean_environment(), *launchers.variables, "HOME", "HF_HOME", "SET_BEFORE"])}
    ours = reports(launchers.ddplaunch("--max-restarts", "2", PROGRAMS / "contract.py", env=before))
    theirs = reports(launchers.torchrun("--max-restarts", "2", PROGRAMS / "contract.py", env=before))
    for our, their in zip(ours, theirs, strict=True):
        variables = our["documented"]
        assert variables["MASTER_ADDR"] == "127.0.0.1"  # torchrun says localhost, and may say the host's name
        assert 0 < int(variables["MASTER_PORT"]) < 65536
        assert variables["TORCHELASTIC_RUN_ID"] == ours[0]["documented"]["TORCHELASTIC_RUN_ID"] != ""
        own = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")  # each job has another
        assert {name: value for name, value in variables.items() if name not in own} == {
            name: value for name, value in their["documented"].items() if name not in own
        }
        for key in ("elastic", "node_local_rank", "ranks"):
            assert our[key] == their[key]
        assert our["elastic"] is True
        # docs/frameworks.md names the one that only torchrun has, and docs/fidelity.md of ours.
        assert set(their["set"]) - set(our["set"]) == {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
        assert set(our["set"]) - set(their["set"]) == {"NODE_RANK", "DDPLAUNCH_DEVICE", "DDPLAUNCH_PREEMPTED_FILE"}


def test_what_record_writes_is_what_is_reported(launchers):
    ours, theirs = launchers.ddplaunch(PROGRAMS / "recorded.py"), launchers.torchrun(PROGRAMS / "recorded.py")
    assert (ours.returncode, theirs.returncode) == (1, 1)
    report = ours.stderr[ours.stderr.index("ddplaunch: ") :]
    assert report.startswith("ddplaunch: rank 1 failed with ValueError: this batch is empty (exit code 1)\n")
    for shown in (report, theirs.stderr):
        assert 'raise ValueError("this batch is empty")\n  ValueError: this batch is empty\n' in shown


def test_a_checkpoint_of_two_ranks_is_loaded_by_one_and_by_three(launchers, tmp_path):
    program, folder = PROGRAMS / "checkpoint.py", str(tmp_path / "saved")
    saved = reports(launchers.ddplaunch(f"{program}:main", "--what", "save", "--folder", folder))
    assert sum(report["here"] for report in saved) == len(saved[0]["weights"])  # each rank has a part
    assert all(report["here"] > 0 for report in saved)
    alone = reports(launchers.ddplaunch(program, "load", folder, nproc=1))
    by_three = reports(
        launchers.ddplaunch("-m", program.stem, "load", folder, nproc=3, env={"PYTHONPATH": str(PROGRAMS)})
    )
    assert [report["world_size"] for report in [*saved, *alone, *by_three]] == [2, 2, 1, 3, 3, 3]
    assert len({report["here"] for report in by_three}) > 1
    for report in [*alone, *by_three]:
        assert (report["weights"], report["moments"]) == (saved[0]["weights"], saved[0]["moments"])


def test_a_compiled_model_learns_on_all_ranks(launchers, tmp_path):
    cache = tmp_path / "inductor"
    env = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    env["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # trying out what vectors the machine has would take longer than all else
    ours = reports(launchers.ddplaunch(PROGRAMS / "compiled.py", env=env))
    assert [name for _, _, files in os.walk(cache) for name in files if name.endswith(".so")]  # by the C++ compiler
    for report in ours:
        assert report["losses"][0] == pytest.approx(report["eager"], abs=1e-5)
    both = [sum(losses) for losses in zip(*(report["losses"] for report in ours), strict=True)]
    assert both == sorted(both, reverse=True)  # what the averaged gradients lower is the sum
    assert ours[0]["weight"] == ours[1]["weight"]
