"""Tests of what callers and ranks send to each other: code keeps its lines, and memory is stored once."""

import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import cloudpickle
import pytest

from ddplaunch.features.python import pickle_files


@pytest.fixture(params=["as installed", "without file names"])
def pickler(request, monkeypatch) -> None:
    """cloudpickle as installed, and as 3.1.3, which gives each code the file name "<dynamic-code>"."""
    table = cloudpickle.Pickler.dispatch_table.maps[0]
    reduce = table[CodeType]
    if request.param != "as installed":
        monkeypatch.setitem(table, CodeType, lambda code: reduce(code.replace(co_filename="<dynamic-code>")))


def make_step() -> Callable[[], object]:
    def step() -> object:
        def inner() -> object:
            return {"y": 1}["missing"]

        return inner()

    return step


def test_a_traceback_shows_the_lines_of_code_that_is_sent_by_value(pickler, tmp_path: Path):
    pickle_files.dump(make_step(), str(tmp_path / "call"))
    with pytest.raises(KeyError) as raised:
        pickle_files.load(str(tmp_path / "call"))()
    shown = "".join(traceback.format_exception(raised.value))
    assert '{"y": 1}["missing"]' in shown
    assert shown.count(f'File "{__file__}"') == 3, shown
    assert "dynamic-code" not in shown
