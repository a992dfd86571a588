"""Replaced functions and classes are found, with the versions of dictionaries and, as from Python 3.14 on, without."""

import sys
from types import ModuleType

import pytest

from ddplaunch.core.rank.rank_runner import load_private_module

namespace_record = load_private_module("core/rank/namespace_record")


@pytest.fixture(params=[True, False], ids=["versions", "none"])
def record(request, monkeypatch):
    """A record of ``package``, a module with a function, a class and a number, and of the standard library's json."""
    import json

    package = ModuleType("package")
    package.__dict__.update(function=lambda: 1, Kind=type("Kind", (), {}), number=1)
    monkeypatch.setitem(sys.modules, "package", package)
    found = namespace_record.NamespaceRecord({"package": package, "json.decoder": json.decoder}, ())
    found._has_versions = found._has_versions and request.param
    found.begin()
    return found


def replaced(record) -> list[str]:
    return [name for name, _ in record.list_replaced(("package", "json.decoder"))]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="dictionaries have no version")
def test_dictionaries_have_versions():
    assert namespace_record.NamespaceRecord({}, ())._has_versions


@pytest.mark.parametrize("name", ["function", "Kind"])
def test_a_replaced_function_or_class_is_found_each_time(record, name):
    assert replaced(record) == []
    before = getattr(sys.modules["package"], name)
    setattr(sys.modules["package"], name, None)
    assert list(record.list_replaced(("package",))) == [("package", [before])]
    assert replaced(record) == ["package"]
    assert list(record.list_replaced(())) == []
    setattr(sys.modules["package"], name, before)
    assert replaced(record) == []


def test_a_deleted_function_is_found(record):
    del sys.modules["package"].function
    assert replaced(record) == ["package"]


def test_a_replaced_method_of_the_standard_library_is_found(record, monkeypatch):
    monkeypatch.setattr("json.decoder.JSONDecoder.decode", None)
    assert replaced(record) == ["json.decoder"]


def test_numbers_and_submodules_are_not_compared(record):
    vars(sys.modules["package"])["number"] = 2
    child = ModuleType("package.child")
    record.set_child("package.child", child)
    assert sys.modules["package"].child is child
    assert replaced(record) == []
    vars(sys.modules["package"])["function"] = None
    record.set_child("package.other", child)
    assert replaced(record) == ["package"]
