"""The base class of the requests that a running job answers on its control socket; each has its replies and handler.

All are plain data, checked as the nodes' messages are. Core's requests and those of the features are accepted.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Generic, TypeVar

from ddplaunch.base.types import TaggedMessage
from ddplaunch.core.control_socket.server import RequestContext
from ddplaunch.core.feature import load_features

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
    own = [f"{__package__}.{module}" for module in ("output_request", "status_request")]
    for module in (*own, *load_features().request_modules()):
        import_module(module)
    return tuple(Request.__subclasses__())
