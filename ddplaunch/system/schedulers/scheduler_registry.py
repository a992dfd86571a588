"""Registry of the batch schedulers that features bring: the values of ``--scheduler``, their titles and classes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.system.schedulers.scheduler import Scheduler
    from ddplaunch.system.schedulers.submitted_job import SubmittedJob

SCHEDULER_TITLES: dict[str, str] = {}

SUBMIT_COMMANDS: dict[str, str] = {}
"""Schedulers with a command ``submit`` of their own, and its module."""

JOB_FINDERS: dict[str, Callable[[], bool]] = {}
"""Schedulers that find jobs which are not on record (``Scheduler.find_job``), and whether they can on this machine."""

_CLASSES: dict[str, tuple[str, str]] = {}  # module and class of each; imported on use


def register_scheduler(
    name: str,
    title: str,
    module: str,
    kind: str,
    command: str | None = None,
    may_find: Callable[[], bool] | None = None,
) -> None:
    """Make a scheduler known by its ``--scheduler`` name; ``kind`` is its class in ``module``."""
    SCHEDULER_TITLES[name], _CLASSES[name] = title, (module, kind)
    if command:
        SUBMIT_COMMANDS[name] = command
    if may_find:
        JOB_FINDERS[name] = may_find


def make_scheduler(name: str) -> Scheduler:
    """Create the scheduler with this ``--scheduler`` name."""
    module, kind = _CLASSES[name]
    found: Scheduler = getattr(import_module(module), kind)()
    return found


def get_scheduler(job: SubmittedJob) -> Scheduler:
    """Create the scheduler object for the batch scheduler to which this job was submitted."""
    return make_scheduler(job.scheduler)
