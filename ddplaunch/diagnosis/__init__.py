"""Diagnosis of inspected ranks: who waits for whom, stalls, slow ranks, out of memory. Pure, standard library only.

The modules are loaded at their first use, as ``diagnosis.stall``: a run without problems needs none of them.
"""

from __future__ import annotations

from ddplaunch import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from ddplaunch.diagnosis import arrivals as arrivals
    from ddplaunch.diagnosis import culprit as culprit
    from ddplaunch.diagnosis import inspection as inspection
    from ddplaunch.diagnosis import memory as memory
    from ddplaunch.diagnosis import pace as pace
    from ddplaunch.diagnosis import profile as profile
    from ddplaunch.diagnosis import readings as readings
    from ddplaunch.diagnosis import sentences as sentences
    from ddplaunch.diagnosis import stack_dump as stack_dump
    from ddplaunch.diagnosis import stall as stall
    from ddplaunch.diagnosis import standing as standing
    from ddplaunch.diagnosis import waits as waits


def __getattr__(name: str) -> ModuleType:
    from importlib import import_module

    module = f"{__name__}.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise AttributeError(name) from None
