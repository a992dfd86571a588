"""Tests that a new GPU vendor needs a file with its reader and variables, and a line in the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.package_copy import copy_package, run_copy

TOY = """
from ddplaunch.system.devices.vendor import Vendor, VisibleGpus, as_whole_gpu
from ddplaunch.system.plan.hardware import Gpu


def _read(trees):
    return [Gpu("toy", index, f"Toy {index}") for index in range(3)], ["A toy was found."]


def _inherited(gpus, environ):
    kept = environ.get("TOY_VISIBLE", "0,1,2").split(",")
    return VisibleGpus(tuple(as_whole_gpu(gpu) for gpu in gpus if str(gpu.index) in kept), "TOY_VISIBLE")


def _select(chosen, notes, environ):
    return VisibleGpus(tuple(chosen), "--gpus", {"TOY_VISIBLE": ",".join(each.token for each in chosen)}, tuple(notes))


TOY = Vendor("toy", "Toy", "toy", _read, _inherited, _select, backend="tccl", masks=("TOY_VISIBLE",))
"""


@pytest.mark.slow
def test_a_new_vendor_is_a_file_and_a_line(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    (package / "system/devices/toy.py").write_text(TOY)
    table = package / "system/devices/__init__.py"
    imported = "from ddplaunch.system.devices.toy import TOY\n"
    table.write_text(table.read_text().replace("\nVENDORS = (", f"{imported}\nVENDORS = (TOY, "))
    shown = run_copy(tmp_path, "devices", "--json", TOY_VISIBLE="0,2")
    assert [each["device"] for each in json.loads(shown)["visible"]["devices"]] == ["toy:0", "toy:1"]
    plan = run_copy(tmp_path, "run", "--dry-run", "--json", "--gpus", "2,1", "--backend", "auto", "train.py")
    found = json.loads(plan.splitlines()[-1])
    assert (found["backend"], [rank["device"] for rank in found["ranks"]]) == ("tccl", ["toy:0", "toy:1"])
    assert found["ranks"][0]["env"]["TOY_VISIBLE"] == "2,1"
