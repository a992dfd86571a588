"""Messages of inspection between a node and node 0."""

from __future__ import annotations

from ddplaunch.base.types import Count, ShortText
from ddplaunch.core.messages import AttemptMessage, FromNode, FromNodeZero
from ddplaunch.observe.diagnosis.inspection import CollectiveArrivals


class ArrivalsReported(AttemptMessage, FromNode, frozen=True):
    """When finished ranks of this node entered their last collectives; sent before ``AttemptReport``."""

    arrivals: tuple[CollectiveArrivals, ...]


class StallSuspected(AttemptMessage, FromNode, frozen=True):
    """The ranks of this node make no progress, or have waited long for a busy one: check the job."""


class StragglersFound(AttemptMessage, FromNode, frozen=True):
    """Ranks of this node still run ``--straggler-timeout`` after the last of its other ranks has ended."""


class CrashSeen(AttemptMessage, FromNode, frozen=True):
    """Native code has failed in a rank of this node, which waits until it has been inspected."""

    rank: Count


class CrashInspected(AttemptMessage, FromNodeZero, frozen=True):
    """Allow a crashed rank to end: the other ranks have been inspected."""

    rank: Count
    text: ShortText  # in which collectives it and the others were; "" if it was in none
