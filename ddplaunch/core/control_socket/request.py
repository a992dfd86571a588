"""The base class of the requests that a running job answers on its control socket; each has its replies and handler.

All are plain data, checked as the nodes' messages are. Core's requests and those of each feature's ``request.py`` are
accepted.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Generic, TypeVar

from ddplaunch import features
from ddplaunch.base.types import TaggedMessage
from ddplaunch.core.control_socket.server import RequestContext

A = TypeVar("A", covariant=True)  # the reply, or the last kind of them


class Request(TaggedMessage, Generic[A], frozen=True):
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
    """Import the modules of core and of the features that define requests, and return all request types."""
    for module in ("output_request", "status_request"):
        import_module(f"{__package__}.{module}")
    for feature in iter_modules(features.__path__, f"{features.__name__}."):
        if find_spec(f"{feature.name}.request"):
            import_module(f"{feature.name}.request")
    return tuple(Request.__subclasses__())
