"""What a client may ask of a running job: a file each, with the request, its answers, and how the job answers.

All are plain data, checked as the nodes' messages are. Every ``Request`` that a file here defines may be made.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from ddplaunch.job.door import RequestContext

A = TypeVar("A", covariant=True)  # the answer, or the last kind of them


class Request(Generic[A]):
    """What a client may make. ``answers`` are all that it may be answered with, in order; ``A`` is the last of them."""

    answers = tuple[type, ...]()  # without an annotation: it is no field

    @property
    def is_streaming(self) -> bool:
        """Whether it is answered as long as the job runs; few clients at a time may make such a one."""
        return False

    def handle(self, context: RequestContext) -> None:
        """Answer it, now or later."""
        raise NotImplementedError


@cache
def all_requests() -> tuple[type[Request[object]], ...]:
    """All that may be made."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return tuple(Request.__subclasses__())
