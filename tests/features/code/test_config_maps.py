"""Tests of code in ConfigMaps: their sizes, and that a container's shell unpacks them."""

import base64
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
        Path(folder).mkdir()
    built = build_code_volume(pack(tmp_path / "project", size), "wine", ".")
    assert [part.name for part in built.parts] == [f"wine-code-{built.version.sha[:8]}-{at}" for at in range(parts)]
    for part in built.parts:
        assert len(part.data) * 3 / 4 < 1_000_000  # the limit of 1 MiB is on the bytes, and on the metadata
        (tmp_path / "parts" / part.file).write_bytes(base64.b64decode(part.data))
    sources = built.volumes[0]["projected"]["sources"]  # type: ignore[index, call-overload]
    assert [source["configMap"]["name"] for source in sources] == [part.name for part in built.parts]  # type: ignore
    done = subprocess.run(["sh", "-c", f"{built.command} && cat train.py"], capture_output=True, text=True, check=True)
    assert done.stdout == "print('here')\n"


def test_more_than_etcd_takes_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"has 9 MiB packed: Kubernetes gets at most 8 MiB"):
        build_code_volume(pack(tmp_path, 9 << 20), "wine", ".")
