"""Tests that the pictures of docs/ show the present output; ``python -m tests.diagrams`` draws them."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.diagrams import failure, layers, stacks
from tests.diagrams.terminal import lines

VARYING = re.compile(r"\[[013]\] \w+Error: |  then rank |  \d other ranks? |.* [~^]+$")
"""What ranks say that lose a peer before they are stopped, how many did, and what Python 3.13 underlines."""


def essence(drawing: str) -> list[str]:
    """What is the same in every run: the ranks race, so the order is not."""
    return sorted(re.sub(r"\d+", "0", line) for line in lines(drawing) if not VARYING.match(line))


@pytest.mark.slow
@pytest.mark.parametrize("of", [failure, stacks], ids=["failure", "stacks"])
def test_the_picture_shows_what_a_terminal_shows(of: ModuleType, tmp_path: Path) -> None:
    assert essence(of.PICTURE.read_text(encoding="utf-8")) == essence(of.picture(tmp_path))


def test_the_layers_are_those_of_the_package() -> None:
    assert layers.PICTURE.read_text(encoding="utf-8") == layers.layers(), "python -m tests.diagrams layers"


@pytest.mark.parametrize("of", [failure, stacks, layers], ids=["failure", "stacks", "layers"])
def test_the_picture_loads_nothing(of: ModuleType) -> None:
    drawing = of.PICTURE.read_text(encoding="utf-8")
    assert re.findall(r"url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)", drawing) == []
