"""docs/failure.svg shows what a terminal shows; ``python -m tests.pictures`` draws it again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pictures.failure import PICTURE, lines, picture

VARYING = re.compile(r"\[[013]\] \w+Error: |  then rank |  \d other ranks? |.* [~^]+$")
"""What ranks say that lose a peer before they are stopped, how many did, and what Python 3.13 underlines."""


def essence(drawing: str) -> list[str]:
    """What is the same in every run: the ranks race, so the order is not."""
    return sorted(re.sub(r"\d+", "0", line) for line in lines(drawing) if not VARYING.match(line))


@pytest.mark.slow
def test_the_picture_shows_what_a_terminal_shows(tmp_path: Path) -> None:
    assert essence(PICTURE.read_text(encoding="utf-8")) == essence(picture(tmp_path))


def test_the_picture_loads_nothing() -> None:
    drawing = PICTURE.read_text(encoding="utf-8")
    assert re.findall(r"url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)", drawing) == []
