"""The schedulers by the names that ``--scheduler`` has: what each is called, and what asks it about a submitted job."""

from __future__ import annotations

from ddplaunch import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.queue.scheduler import Scheduler
    from ddplaunch.queue.submitted import Submitted

SCHEDULERS = {"slurm": "Slurm", "sge": "Grid Engine", "pbs": "PBS", "lsf": "LSF"}

_CLASSES = {
    "slurm": ("queue", "Slurm"),
    "sge": ("gridengine", "GridEngine"),
    "pbs": ("pbs", "Pbs"),
    "lsf": ("lsf", "Lsf"),
}
"""Found by name, so that no room below knows a command."""


def scheduler_of(job: Submitted) -> Scheduler:
    """Whom to ask about a job, and who cancels it."""
    return scheduler(job.scheduler)


def scheduler(name: str) -> Scheduler:
    """The one of that name."""
    from importlib import import_module

    module, kind = _CLASSES[name]
    found: Scheduler = getattr(import_module(f"ddplaunch.commands.submit.{module}"), kind)()
    return found
