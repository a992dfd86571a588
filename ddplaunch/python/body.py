"""The body of a test in a rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest

from ddplaunch import runtime
from ddplaunch.python.plugin import InRank


def run(function: Callable[..., object], given: dict[str, object], port: int) -> tuple[str | None, list[str]]:
    """Run the body here; return why it was skipped, and what it left that the next test would find."""
    os.environ["MASTER_PORT"] = str(port)  # a store that is empty: a test may make a process group of its own
    own = {"rank": runtime.rank, "world_size": runtime.world_size, "device": runtime.device}
    arguments = {name: own[value.name]() if isinstance(value, InRank) else value for name, value in given.items()}
    before, skipped = _state(), None
    try:
        function(**arguments)
    except pytest.skip.Exception as error:
        skipped = str(error.msg)
    return skipped, [words for words, value in _state().items() if value != before[words]]


def _state() -> dict[str, object]:
    """What tests share in a process, by what is to be said of a change."""
    torch = sys.modules.get("torch")
    found: dict[str, object] = {
        "leaves other variables": dict(os.environ),
        "leaves another working folder": os.getcwd(),
        "leaves another default dtype": None,
        "leaves a process group open, or closed one that it had": False,
    }
    if torch is not None:
        found["leaves another default dtype"] = str(torch.get_default_dtype())
        with suppress(AttributeError):
            found["leaves a process group open, or closed one that it had"] = torch.distributed.is_initialized()
    return found
