"""Batch systems that give a job's script a file of its hosts and number nothing: a row each.

They run the script on the first of the hosts.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Allocation, Finding
from ddplaunch.clusters.reading import batch_script, is_set, read_hosts
from ddplaunch.dataclass import dataclass

STARTER = "mpirun with one process per host"


@dataclass(frozen=True)
class HostFile:
    """One system, by the names of its variables."""

    cluster: str
    source: str
    job_id: str
    file: str

    def find(self, environ: Mapping[str, str]) -> Finding | None:
        """Recognise a job's script."""
        given = self.allocation(environ)
        return batch_script(self.cluster, (self.job_id, self.file), given, STARTER) if given else None

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the job's hosts."""
        if not is_set(environ, self.job_id, self.file):
            return None
        return Allocation(environ[self.job_id], read_hosts(environ[self.file]), self.file)


_ROWS = (
    HostFile(
        "cobalt", "job scripts of Argonne's systems: mpirun -f $COBALT_NODEFILE", "COBALT_JOBID", "COBALT_NODEFILE"
    ),
    HostFile(
        "oar",
        'oar.readthedocs.io, oarsub, "the allocated nodes list is contained in $OAR_NODEFILE"; a line a core',
        "OAR_JOB_ID",
        "OAR_NODEFILE",
    ),
    HostFile(
        "pjm",
        "Fujitsu's Technical Computing Suite, as job scripts of its sites have it: mpirun -machinefile $PJM_O_NODEINF",
        "PJM_JOBID",
        "PJM_O_NODEINF",
    ),
)

ROWS = {row.cluster: row for row in _ROWS}
