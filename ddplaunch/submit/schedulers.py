"""The schedulers by the names that ``--scheduler`` has: what each is called, and who asks it about a submitted job."""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.job.submitted import Submitted
    from ddplaunch.submit.follow import Scheduler

SCHEDULERS = {"slurm": "Slurm", "sge": "Grid Engine", "pbs": "PBS", "lsf": "LSF"}


def scheduler_of(job: Submitted) -> Scheduler:
    """Whom to ask about a job, and who cancels it."""
    from ddplaunch.submit import lsf_batch, pbs_server, qmaster, queue

    makers: dict[str, Callable[[str], Scheduler]] = {
        "slurm": lambda log: queue,
        "sge": qmaster.Scheduler,
        "pbs": pbs_server.Scheduler,
        "lsf": lsf_batch.Scheduler,
    }
    return makers[job.scheduler](job.log)
