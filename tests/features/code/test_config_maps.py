"""Tests of code in ConfigMaps: their sizes, and that a container's shell unpacks them."""

import base64
import json
import os
import subprocess
from pathlib import Path

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.features.code import config_maps
from ddplaunch.features.code.archive import CodeArchive, pack_folder
from ddplaunch.features.code.config_maps import build_code_volume
from tests.features.code.project import make_project


def pack(folder: Path, size: int) -> CodeArchive:
    return pack_folder(str(make_project(folder, {"train.py": "print('here')\n", "weights": os.urandom(size)})))


@pytest.mark.parametrize(("size", "parts"), [(1000, 1), (2 << 20, 3), (7 << 20, 8)])
def test_a_container_unpacks_the_parts(tmp_path: Path, monkeypatch, size: int, parts: int):
    folders = {"PARTS_FOLDER": str(tmp_path / "parts"), "CODE_FOLDER": str(tmp_path / "code")}
    for name, folder in folders.items():
        monkeypatch.setattr(config_maps, name, folder)
    owner = {"kind": "Job", "name": "wine", "uid": "1"}
    built = build_code_volume(pack(tmp_path / "project", size), "wine", ".", {"app": "wine"}, owner)
    assert len(built.config_maps) == parts
    (tmp_path / "parts").mkdir()
    for number, each in enumerate(built.config_maps):
        assert len(json.dumps(each)) * 3 / 4 < 1 << 20  # the limit is on the bytes, which JSON has in base64
        assert each["metadata"] == {
            "name": f"wine-code-{number}",
            "labels": {"app": "wine"},
            "ownerReferences": [owner],
        }
        ((key, part),) = each["binaryData"].items()
        (tmp_path / "parts" / key).write_bytes(base64.b64decode(part))
    sources = [source["configMap"]["name"] for source in built.volume["projected"]["sources"]]
    assert sources == [each["metadata"]["name"] for each in built.config_maps]
    done = subprocess.run(["sh", "-c", f"{built.command} && cat train.py"], capture_output=True, text=True, check=True)
    assert done.stdout == "print('here')\n"


def test_more_than_etcd_takes_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"has 9 MiB packed: Kubernetes gets at most 8 MiB"):
        build_code_volume(pack(tmp_path, 9 << 20), "wine", ".", {})
