"""The schedulers by the names that ``--scheduler`` has: what each is called, and the class that speaks to it."""

from __future__ import annotations

from importlib import import_module

from ddplaunch import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.queue.scheduler import Scheduler
    from ddplaunch.queue.submitted import Submitted

_TABLE = {
    "slurm": ("Slurm", "commands.submit.slurm", "Slurm"),
    "sge": ("Grid Engine", "commands.submit.gridengine", "GridEngine"),
    "pbs": ("PBS", "commands.submit.pbs", "Pbs"),
    "lsf": ("LSF", "commands.submit.lsf", "Lsf"),
}
"""What people call each, its module and its class, which is found by name: no room below knows a command."""

SCHEDULERS = {name: system for name, (system, _, _) in _TABLE.items()}


def scheduler(name: str) -> Scheduler:
    """The one of that name."""
    _, module, kind = _TABLE[name]
    found: Scheduler = getattr(import_module(f"ddplaunch.{module}"), kind)()
    return found


def scheduler_of(job: Submitted) -> Scheduler:
    """The scheduler that answers for a job, and cancels it."""
    return scheduler(job.scheduler)
