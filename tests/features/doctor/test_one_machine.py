"""Tests of ``ddplaunch doctor`` on one machine: findings about GPUs and folders, and a machine without problems."""

import json
import os
import re
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from ddplaunch.features.doctor.checks import gpus
from tests.conftest import ddplaunch_command, free_port, run_command, write_program
from tests.features.doctor.facts import FACTS, describe_findings
from tests.features.doctor.findings import NO_GPU_ANSWER

pytestmark = pytest.mark.slow


def look(folder, *words, env=None):
    """Return the exit code and what is printed."""
    done = run_command(ddplaunch_command("doctor", *words), folder, env)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.ci
def test_the_report_of_one_machine_and_its_comparison_with_a_saved_one(tmp_path):
    """Measurements that were saved and then made a hundred times better are reported as slower now."""
    code, page, found = look(tmp_path, "--save", "saved.json")
    assert found == "ddplaunch: examining this machine\nddplaunch: measuring all_reduce\n"
    assert code == bool(re.search(r"^\d+ errors?\b", page, re.MULTILINE))
    assert max(map(len, page.splitlines())) <= 80
    assert re.search(r"^torch +\d", page, re.MULTILINE)
    assert re.search(r" alone, \d+ ranks \(gloo\) +\d+ us +\S+ \S+/s +\S+ \S+/s$", page, re.MULTILINE)
    assert os.path.expanduser("~/") not in page, "it is made to be copied"

    path = tmp_path / "saved.json"
    saved = json.loads(path.read_text())
    assert saved["hosts"] == saved["figures"][0]["hosts"]
    for figure in saved["figures"]:
        figure["value"] *= 0.01 if figure["unit"] == "s" else 100
    path.write_text(json.dumps(saved))
    _, page, _ = look(tmp_path, "--compare", "saved.json", "--save", "saved.json")
    if "runnable processes" not in page:
        assert len(re.findall(rf"\bit was \S+ (us|[GT]FLOP/s|[KMGT]iB/s) on\s+{saved['date'][:10]}", page)) == 3, page
    assert json.loads(path.read_text())["figures"] != saved["figures"], "it was read before it was written"


def test_gpus_with_errors_and_a_lost_gpu(monkeypatch, fake_nvml):
    environ = fake_nvml.environ(4, ailing="1:85:64:3:1", busy=[(2, os.getpid(), 4096)], lost=3)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    facts: Any = gpus.CHECK.read(None)()
    assert [gpu.index for gpu in facts["gpus"]] == [0, 1, 2]
    *found, used = sorted(describe_findings(replace(FACTS, torch=None, **facts)), key=lambda each: " in use" in each)
    assert found == [
        "error n0: no torch",
        f"error n0 GPU 3: {NO_GPU_ANSWER}: GPU is lost",
        "warning n0 GPU 1: its memory has faulty rows or pages, which a reset replaces",
        "warning n0 GPU 1: 3 memory errors since the driver was loaded that ECC could not correct",
        "warning n0 GPU 1: its clock is reduced by hardware, because of heat at 85 °C",
    ]
    name = re.escape(psutil.Process().name())  # pytest-xdist sets one with spaces
    assert re.search(rf"^warning n0 GPU 2: 4.0 GiB of 79.6 GiB are in use, by {name} {os.getpid()} of \S+$", used)


def test_a_machine_where_nothing_can_be_written(tmp_path):
    """It names the folders, and a missing node; it needs no disk itself. A limit of file sizes plays full disks."""
    write_program(tmp_path, "torch.py", "raise ImportError('not today')\n")  # nothing is measured
    place = f"--nnodes 2 --node-rank {{}} --master-addr 127.0.0.1 --master-port {free_port() - 1}"
    words = ddplaunch_command("doctor", "--json", *place.format(0).split(), "--join-timeout", "0")
    command = ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *words]
    environ = {"TMPDIR": "/proc", "HOME": str(tmp_path), "XDG_CACHE_HOME": "", "PYTHONPATH": str(tmp_path)}
    done = run_command(command, "/", environ)
    found = json.loads(done.stdout)
    (of_torch,) = [each for each in found["findings"] if "not today" in each["text"]]
    assert of_torch["hint"] == "see: python -c 'import torch'"
    (wrong,) = [each for each in found["findings"] if "TMPDIR" in each["text"]]
    assert (done.returncode, wrong["severity"]) == (1, "error")
    assert wrong["text"].startswith("cannot write to TMPDIR: ")
    assert "cannot write to the cache folder: File too large" in [each["text"] for each in found["findings"]]
    assert wrong["hint"] == "choose another: export TMPDIR=FOLDER"
    (absent,) = [each for each in found["findings"] if each["subject"] == "node 1"]
    assert absent["text"] == "did not respond: no connection within 0 s (--join-timeout)"
    assert absent["hint"] == "check whether this works: ddplaunch doctor " + place.format(1)
    (folder,) = [each for each in found["nodes"][0]["facts"]["folders"] if each["what"] == "TMPDIR"]
    assert not folder["free"], "the free space of another folder"


def test_a_driver_that_does_not_answer(monkeypatch, tmp_path, fake_nvml):
    (tmp_path / "wedged").touch()
    for name, value in {**fake_nvml.environ(1), "FAKE_NVML_WEDGED": str(tmp_path / "wedged")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpus, "REPLY_TIMEOUT_S", 0.3)
    facts = gpus.CHECK.read(None)()
    assert facts["gpus_error"] == "the GPU driver did not answer within 0.3 s"
