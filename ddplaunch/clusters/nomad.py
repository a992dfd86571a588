"""Nomad: an allocation of a task group, which knows its index alone.

The index is that of developer.hashicorp.com/nomad/docs/runtime/environment; no variable has the group's count.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import a_copy, is_set

INDEX = "NOMAD_ALLOC_INDEX"  # 1


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise an allocation, which is one of many jobs as far as it knows."""
    return a_copy("nomad", environ, INDEX, "a count", "allocation") if is_set(environ, INDEX) else None
