"""The schedulers by the names that ``--scheduler`` has: what each is called, and the class that speaks to it."""

from __future__ import annotations

from importlib import import_module

from ddplaunch import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.queue.scheduler import Scheduler
    from ddplaunch.queue.submitted import SubmittedJob

_REGISTRY = {
    "slurm": ("Slurm", "commands.submit.slurm", "Slurm"),
    "sge": ("Grid Engine", "commands.submit.gridengine", "GridEngine"),
    "pbs": ("PBS", "commands.submit.pbs", "Pbs"),
    "lsf": ("LSF", "commands.submit.lsf", "Lsf"),
}
"""What people call each, its module and its class, which is found by name: no room below knows a command."""

SCHEDULER_TITLES = {name: system for name, (system, _, _) in _REGISTRY.items()}


def make_scheduler(name: str) -> Scheduler:
    """The one of that name."""
    _, module, kind = _REGISTRY[name]
    found: Scheduler = getattr(import_module(f"ddplaunch.{module}"), kind)()
    return found


def scheduler_of(job: SubmittedJob) -> Scheduler:
    """The scheduler that answers for a job, and cancels it."""
    return make_scheduler(job.scheduler)
