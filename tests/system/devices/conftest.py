"""Fixtures for tests of device readers: made-up trees of kernel files, and the fake NVML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.fake_nvml import fake_nvml as fake_nvml

MakeTree = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    """Write files (path to text) below a folder and return it; a text "-> x" makes a link to x within the tree."""

    def make(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("-> "):
                path.symlink_to(tmp_path / text[3:])
            else:
                path.write_text(text)
        return tmp_path

    return make
