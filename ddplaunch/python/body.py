"""The body of a test in a rank."""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from ddplaunch import runtime
from ddplaunch.python.plugin import RankValue

_tests = itertools.count(1)


Result = tuple[tuple[str, str] | None, list[str]]
"""The outcome ("skip" or "xfail", and why) unless the test passed, and what it left that the next test would find."""


def run_body(function: Callable[..., object], given: dict[str, object]) -> Result:
    """Run the body in this rank."""
    _isolate_store_keys(next(_tests))
    own = {"rank": runtime.rank, "world_size": runtime.world_size, "device": runtime.device}
    arguments = {name: own[value.name]() if isinstance(value, RankValue) else value for name, value in given.items()}
    generators, hook = _generator_resetters(), sys.excepthook
    before, outcome = _capture_state(), None
    try:
        function(**arguments)
    except (pytest.skip.Exception, pytest.xfail.Exception) as error:
        outcome = ("skip" if isinstance(error, pytest.skip.Exception) else "xfail", str(error.msg))
    for restore, state in generators:
        restore(state)
    sys.excepthook = hook  # each process group puts one of torch's before it
    after = _capture_state()
    return outcome, [words for words in {**before, **after} if before.get(words) != after.get(words)]


def _isolate_store_keys(test: int) -> None:
    """Give each process group of this test keys of its own in the job's store, which keeps those of others."""
    import torch.distributed as dist

    handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    if "env" not in handlers:  # a torch without distributed
        return
    rendezvous = getattr(handlers["env"], "__wrapped__", handlers["env"])
    groups = itertools.count(1)

    @functools.wraps(rendezvous)
    def separate(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, world_size in rendezvous(*args, **kwargs):
            yield dist.PrefixStore(f"test {test}, group {next(groups)}", store), rank, world_size

    handlers["env"] = separate


def _generator_resetters() -> list[tuple[Callable[[Any], object], Any]]:
    """How to set the generators of random numbers back to what they are now: a test may seed them."""
    found: list[tuple[Callable[[Any], object], Any]] = [(random.setstate, random.getstate())]
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        found.append((numpy.random.set_state, numpy.random.get_state()))
    if torch is not None:
        found.append((torch.set_rng_state, torch.get_rng_state()))
        if torch.cuda.is_initialized():
            found.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    return found


def _capture_state() -> dict[str, object]:
    """What tests share in a process, by what is to be said of a change."""
    torch = sys.modules.get("torch")
    found: dict[str, object] = {f"leaves the variable {name} changed": value for name, value in os.environ.items()}
    found["leaves another working folder"] = os.getcwd()
    if torch is not None:
        found["leaves another default dtype"] = str(torch.get_default_dtype())
        with suppress(AttributeError):
            found["leaves a process group open, or closed one that it had"] = torch.distributed.is_initialized()
    return found
