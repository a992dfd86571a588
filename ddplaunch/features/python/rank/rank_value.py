"""A fixture's value that differs in each rank."""

from __future__ import annotations


class RankValue:
    """Placeholder of a fixture whose value differs in each rank."""

    def __init__(self, name: str) -> None:
        self.name = name
