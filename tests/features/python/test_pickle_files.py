"""Tests of what callers and ranks send to each other: code keeps its lines, and memory is stored once."""

import traceback
from collections.abc import Callable
from pathlib import Path
from pickle import PickleBuffer
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


@pytest.mark.parametrize(("size", "files"), [(1 << 20, 3), ((1 << 20) - 1, 1)])
def test_a_large_buffer_has_a_file_of_its_own(size, files, tmp_path: Path):
    """As that of a numpy array; what a reader writes to it stays its own."""
    sent = [bytes([number]) * size for number in range(2)]
    pickle_files.dump([PickleBuffer(bytearray(each)) for each in sent], str(tmp_path / "result"))
    assert len([*tmp_path.iterdir()]) == files
    for _ in range(2):
        found = pickle_files.load(str(tmp_path / "result"))
        assert [bytes(memoryview(each)) for each in found] == sent
        found[0][:1] = b"x"


@pytest.mark.slow
@pytest.mark.parametrize("size", [1 << 20, 1 << 10])
def test_a_tensor_with_many_views_is_stored_once(size, tmp_path: Path):
    """Large ones in a file of their own, small ones in the pickle; the views share the memory afterwards."""
    import torch

    whole = torch.arange(size, dtype=torch.float32)
    views = [*whole.split(size // 64), whole.view(torch.int32), whole[::2]]
    part = torch.from_numpy(whole.numpy()[:2])  # another memory for torch, at the same address
    pickle_files.dump([views, part, torch.zeros(0), torch.zeros(0)], str(tmp_path / "result"))
    stored = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert stored < 4 * size + 30_000, stored
    found, pair, *empty = pickle_files.load(str(tmp_path / "result"))
    assert all(torch.equal(one, other) for one, other in zip(views, found, strict=True))
    found[0][0] = 7
    assert float(found[-1][0]) == 7
    assert float(whole[0]) == 0
    assert pair.tolist() == [0, 1]
    empty[0].resize_(1)
    assert [each.numel() for each in empty] == [1, 0]
