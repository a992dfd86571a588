"""A fixture's value that differs in each rank."""

from __future__ import annotations


class RankValue:
    """Stands for the value of a fixture that differs in each rank, until the rank fills it in."""

    def __init__(self, name: str) -> None:
        self.name = name
