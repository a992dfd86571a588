"""Runs the body of a pytest test in a rank, and reports global state that the test has changed."""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from ddplaunch import runtime
from ddplaunch.base.safe_files import current_folder
from ddplaunch.features.python.rank.rank_value import RankValue

_tests = itertools.count(1)


Result = tuple[tuple[str, str] | None, list[str]]
"""The outcome ("skip" or "xfail", and why; None if the test passed), and its changes to state that tests share."""


def run_body(function: Callable[..., object], given: dict[str, object], filters: list[Any]) -> Result:
    """Run the test's body in this rank.

    Args:
        given: the values of its fixtures, by name.
        filters: ``warnings.filters`` of pytest's process during this test.
    """
    _isolate_store_keys(next(_tests))
    own = {"rank": runtime.rank, "world_size": runtime.world_size, "device": runtime.device}
    arguments = {name: own[value.name]() if isinstance(value, RankValue) else value for name, value in given.items()}
    generators, hook = _generator_resetters(), sys.excepthook
    before, outcome = _capture_state(), None
    try:
        with warnings.catch_warnings():
            warnings.resetwarnings()  # which also makes the interpreter notice that the list changes
            active: Any = warnings.filters
            active[:] = filters
            function(**arguments)
    except (pytest.skip.Exception, pytest.xfail.Exception) as error:
        outcome = ("skip" if isinstance(error, pytest.skip.Exception) else "xfail", str(error.msg))
    for restore, state in generators:
        restore(state)
    sys.excepthook = hook  # torch wraps it at each creation of a process group
    after = _capture_state()
    return outcome, [change for change in {**before, **after} if before.get(change) != after.get(change)]


def _isolate_store_keys(test: int) -> None:
    """Prefix the store keys of each process group of this test: the job's store still has keys of earlier tests."""
    import torch.distributed as dist

    handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    if "env" not in handlers:  # a torch without distributed
        return
    rendezvous = getattr(handlers["env"], "__wrapped__", handlers["env"])
    groups = itertools.count(1)

    @functools.wraps(rendezvous)
    def prefix_keys(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, world_size in rendezvous(*args, **kwargs):
            yield dist.PrefixStore(f"test {test}, group {next(groups)}", store), rank, world_size

    handlers["env"] = prefix_keys


def _generator_resetters() -> list[tuple[Callable[[Any], object], Any]]:
    """Return functions that restore the random generators, each with the state to restore: a test may seed them."""
    resetters: list[tuple[Callable[[Any], object], Any]] = [(random.setstate, random.getstate())]
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        resetters.append((numpy.random.set_state, numpy.random.get_state()))
    if torch is not None:
        resetters.append((torch.set_rng_state, torch.get_rng_state()))
        if torch.cuda.is_initialized():
            resetters.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    return resetters


def _capture_state() -> dict[str, object]:
    """Return the state that tests share in a process: each value by the message to show if a test changes it."""
    torch = sys.modules.get("torch")
    state: dict[str, object] = {f"changed the variable {name}": value for name, value in os.environ.items()}
    state["changed the working folder"] = current_folder()
    if torch is not None:
        state["changed the default dtype"] = str(torch.get_default_dtype())
        with suppress(AttributeError):
            state["left a process group open, or closed an existing one"] = torch.distributed.is_initialized()
    return state
