"""Messages of inspection between a node and node 0."""

from __future__ import annotations

from ddplaunch.base.types import Count, ShortText
from ddplaunch.core.messages import AttemptMessage, FromNode, FromNodeZero
from ddplaunch.observe.diagnosis.inspection import CollectiveArrivals


class ArrivalsReported(AttemptMessage, FromNode, frozen=True):
    """Message to node 0: when finished ranks entered their last collectives; sent before ``AttemptReport``."""

    arrivals: tuple[CollectiveArrivals, ...]


class StallSuspected(AttemptMessage, FromNode, frozen=True):
    """Message to node 0: the ranks of this node make no progress, or have long waited for a busy rank."""


class StragglersFound(AttemptMessage, FromNode, frozen=True):
    """Message to node 0: some ranks of the node still run ``--straggler-timeout`` after its other ranks ended."""


class CrashSeen(AttemptMessage, FromNode, frozen=True):
    """Message to node 0: native code failed in a rank, which waits until the ranks have been inspected."""

    rank: Count


class CrashInspected(AttemptMessage, FromNodeZero, frozen=True):
    """Message from node 0 that lets a crashed rank end: the other ranks have been inspected."""

    rank: Count
    text: ShortText  # in which collectives it and the others were; "" if it was in none
