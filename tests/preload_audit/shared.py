"""State of a process that belongs to no module, and shared random generators, inside an audit's interpreters.

Standard library only; run from its path.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from tests.preload_audit.state import Reader

_OF_TORCH = (
    "get_default_dtype",
    "get_default_device",
    "get_num_threads",
    "is_grad_enabled",
    "get_float32_matmul_precision",
    "are_deterministic_algorithms_enabled",
)


def state(reader: Reader, environ: Mapping[bytes, bytes]) -> dict[str, int]:
    """The number of each, by words for it."""
    found = {"$" + os.fsdecode(name): reader.number(value) for name, value in environ.items()}
    warnings = sys.modules.get("warnings")
    filters: Any = getattr(warnings, "filters", ())
    # Their order is that of the imports, and matters only where two libraries are at odds about one warning.
    found["warnings.filters"] = hash(tuple(sorted(str(each) for each in filters)))
    found["sys.path"] = hash(tuple(sys.path))
    found["sys.meta_path"] = hash(tuple(getattr(each, "__name__", type(each).__name__) for each in sys.meta_path))
    torch = sys.modules.get("torch")
    if torch is not None:
        read = [getattr(torch, name) for name in _OF_TORCH if hasattr(torch, name)]
        found["torch's settings"] = hash(tuple(str(each()) for each in read))
    return found


def generators() -> Iterator[object]:
    """Those of Python, numpy and torch themselves: each rank seeds them anew (core/rank/rank_runner.py)."""
    random, mtrand, torch = (sys.modules.get(name) for name in ("random", "numpy.random.mtrand", "torch"))
    yield getattr(random, "_inst", None)
    yield getattr(mtrand, "_rand", None)
    yield getattr(getattr(mtrand, "_rand", None), "_bit_generator", None)
    yield getattr(torch, "default_generator", None)
