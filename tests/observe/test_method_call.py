"""Tests of reading which method a frame calls."""

import sys
from typing import Any

import pytest

from ddplaunch.observe.rank.method_call import UnknownValue, read_method_call


@pytest.mark.smoke
def test_an_attribute_that_super_finds_is_not_taken_for_self():
    """Python 3.12 and later have an instruction of their own for it."""
    found = list[Any]()

    class Store:
        def get(self, key: str) -> None:
            found.append(read_method_call(sys._getframe(1), {"get"}))

    class Above:
        store = Store()

    class Trainer(Above):
        def ask(self) -> None:
            super().store.get("epoch")

    Trainer().ask()
    (called,) = found
    assert called is None or isinstance(called[1], UnknownValue)


@pytest.mark.parametrize("size", range(440, 500))
def test_a_long_argument_does_not_hide_which_object_is_called(size: int):
    """It is as long as what is decoded, and the object's number has two bytes: it is that object, or not known."""
    found = list[Any]()

    class Store:
        def get(self, keys: list[int]) -> None:
            found.append(read_method_call(sys._getframe(1), {"get"}))

    names = {f"n{number}": Store() for number in range(300)}
    every = "\n".join(names)
    parts = [f"[{'n1, ' * min(20, size - begin)}]" for begin in range(0, size, 20)]  # longer lists are made otherwise
    exec(f"{every}\nn299.get([{', '.join(parts)}])", names)
    (called,) = found
    assert called is None or called[1] is names["n299"] or isinstance(called[1], UnknownValue)
