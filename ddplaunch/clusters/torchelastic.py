"""torchrun, or another launcher that keeps torch's elastic contract, as ddplaunch does: torch's variables and a run id.

``torch.distributed.is_torchelastic_launched()`` goes by the same variable.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters import torch
from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import is_set
from ddplaunch.dataclass import replace

RUN_ID = "TORCHELASTIC_RUN_ID"  # my-job

UNNAMED = "none"  # torchrun's run id where it was given no --rdzv-id


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a process that torchrun has started."""
    if not is_set(environ, RUN_ID) or not (finding := torch.find(environ)):
        return None
    return replace(
        finding,
        cluster="torchelastic",
        variables=(RUN_ID, *finding.variables),
        run_id=None if environ[RUN_ID] == UNNAMED else environ[RUN_ID],
    )
