"""What a client may ask of a running job: a file each, with the question, its answers, and how the job answers.

All are plain data, checked as the nodes' messages are. Every ``Question`` that a file of this folder defines may be
asked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from ddplaunch.job.door import ServedJob

A = TypeVar("A", covariant=True)  # the answer, or the last kind of them


class Asker(Protocol):
    """A client that has asked, as the door has it."""

    @property
    def job(self) -> ServedJob: ...

    @property
    def waiting(self) -> int: ...  # bytes of answers that it has not taken yet

    def send(self, answer: object) -> None: ...

    def finish(self) -> None:
        """Say that this was all."""

    def soon(self, callback: Callable[[], None]) -> None:
        """Call it in the next step of the loop, if the door is still open then."""

    def at_end(self, leave: Callable[[int | None], None]) -> None:
        """Call ``leave`` when the job has ended, with its exit code if it has one, or when the client has gone."""


class Question(Generic[A]):
    """One question. ``answers`` are all that it may be answered with, in their order; ``A`` is the last of them."""

    answers = tuple[type, ...]()  # without an annotation: it is no field

    @property
    def lasts(self) -> bool:
        """Whether it is answered as long as the job runs; few clients at a time may ask such a thing."""
        return False

    def serve(self, asker: Asker) -> None:
        """Answer it, now or later."""
        raise NotImplementedError


@cache
def questions() -> tuple[type[Question[object]], ...]:
    """All that may be asked."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return tuple(Question.__subclasses__())
