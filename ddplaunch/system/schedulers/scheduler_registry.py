"""Registry of the batch schedulers: the values of ``--scheduler``, their titles and classes."""

from __future__ import annotations

from importlib import import_module

from ddplaunch.system.schedulers.scheduler import Scheduler
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

_REGISTRY = {
    "slurm": ("Slurm", "features.submit.slurm", "Slurm"),
    "sge": ("Grid Engine", "features.submit.gridengine", "GridEngine"),
    "pbs": ("PBS", "features.submit.pbs", "Pbs"),
    "lsf": ("LSF", "features.submit.lsf", "Lsf"),
}
"""Title, module and class of each. Modules are given by name: this package may not import ``commands``."""

SCHEDULER_TITLES = {name: system for name, (system, _, _) in _REGISTRY.items()}


def make_scheduler(name: str) -> Scheduler:
    """Create the scheduler with this ``--scheduler`` name."""
    _, module, kind = _REGISTRY[name]
    found: Scheduler = getattr(import_module(f"ddplaunch.{module}"), kind)()
    return found


def get_scheduler(job: SubmittedJob) -> Scheduler:
    """Create the scheduler that has this job."""
    return make_scheduler(job.scheduler)
