"""What the zygote should import before it forks the ranks: whatever several of them would import themselves.

``torch.nn.parallel.DistributedDataParallel`` and the first optimizer import ``torch._dynamo`` (and sympy with it),
over a second in every rank. Importing it once pays from two ranks on, and is pure loss for a target that never
needs it, so the target's source decides (docs/performance.md has the measurement).
"""

from __future__ import annotations

import re

from ddplaunch.target import source
from ddplaunch.target.target import Kind, Target

TORCH = "torch"
DYNAMO = "torch._dynamo"

_NEEDS_DYNAMO = re.compile(
    r"DistributedDataParallel|\boptim\b|\bfully_shard\b|FullyShardedDataParallel|torch\.compile|\.compile\("
    r"|\blightning\b|\bpytorch_lightning\b|\baccelerate\b|\btransformers\b|\bTrainer\b|ZeroRedundancyOptimizer"
)


def preloads(target: Target) -> tuple[str, ...]:
    """Name the modules worth importing once for all ranks of ``target``, by what its source and local imports say."""
    if target.kind is Kind.PROGRAM:
        return ()
    if target.source is None or target.first is None:
        return (TORCH,)
    for text in source.local_sources(target.source, target.first):
        if _NEEDS_DYNAMO.search(text):
            return (TORCH, DYNAMO)
    return (TORCH,)
