"""The schedulers by the names that ``--scheduler`` has: what each is called, and what asks it about a submitted job."""

from __future__ import annotations

from ddplaunch import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.job.submitted import Submitted
    from ddplaunch.submit.programs import Scheduler

SCHEDULERS = {"slurm": "Slurm", "sge": "Grid Engine", "pbs": "PBS", "lsf": "LSF"}


def scheduler_of(job: Submitted) -> Scheduler:
    """Whom to ask about a job, and who cancels it."""
    return scheduler(job.scheduler)


def scheduler(name: str) -> Scheduler:
    """The one of that name."""
    from ddplaunch.submit import gridengine, lsf, pbs, queue

    return {"slurm": queue.Slurm, "sge": gridengine.GridEngine, "pbs": pbs.Pbs, "lsf": lsf.Lsf}[name]()
