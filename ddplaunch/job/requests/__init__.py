"""The requests that a running job answers on its control socket: one module each, with its replies and handler.

All are plain data, checked as the nodes' messages are. Every ``Request`` that a module here defines is accepted.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from ddplaunch.job.door import RequestContext

A = TypeVar("A", covariant=True)  # the reply, or the last kind of them


class Request(Generic[A]):
    """Base class of requests. ``answers``: the types of its replies, in order; ``A`` is the last of them."""

    answers = tuple[type, ...]()  # without an annotation, so that it is not a field

    @property
    def is_streaming(self) -> bool:
        """Whether replies come until the job ends; MAX_STREAMING_CLIENTS of them at a time are accepted."""
        return False

    def handle(self, context: RequestContext) -> None:
        """Send the replies, now or later."""
        raise NotImplementedError


@cache
def all_requests() -> tuple[type[Request[object]], ...]:
    """Import the modules of this package, and return all request types."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return tuple(Request.__subclasses__())
