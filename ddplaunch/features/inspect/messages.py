"""Messages of inspection from a node to node 0."""

from __future__ import annotations

from ddplaunch.core.messages import AttemptMessage, FromNode
from ddplaunch.features.inspect.diagnosis.inspection import CollectiveArrivals


class ArrivalsReported(AttemptMessage, FromNode, frozen=True):
    """When finished ranks of this node entered their last collectives; sent before ``AttemptReport``."""

    arrivals: tuple[CollectiveArrivals, ...]


class StallSuspected(AttemptMessage, FromNode, frozen=True):
    """The ranks of this node make no progress, or have waited long for a busy one: check the job."""


class StragglersFound(AttemptMessage, FromNode, frozen=True):
    """Ranks of this node still run ``--straggler-timeout`` after the last of its other ranks has ended."""
