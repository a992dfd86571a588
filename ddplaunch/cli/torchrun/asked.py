"""What was asked for by torchrun's names: each option's value, and where it stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ddplaunch.plan.numbers import whole

Word = tuple[str, str, str]
"""One of our options, its value ("" for a flag), and what it comes from."""


class Said(NamedTuple):
    """A value, and the option as typed or the variable that it comes from."""

    value: str
    source: str


class Asked:
    """All of it but what is empty; what turns out to be of no use is collected in ``idle``."""

    def __init__(self, said: Mapping[str, Said]) -> None:
        self._said = {name: each for name, each in said.items() if each.value}
        self.idle: list[Said] = []

    def __contains__(self, name: str) -> bool:
        return name in self._said

    def value(self, name: str, default: str = "") -> str:
        return self._said[name].value if name in self._said else default

    def source(self, name: str) -> str:
        return self._said[name].source

    def plainly(self, name: str, ours: str, values: Mapping[str, str] = {}) -> Iterator[Word]:
        """The same under our name; ``values`` are those that we call otherwise, "" what nobody need say."""
        value = self.value(name)
        if value := values.get(value, value):
            yield ours, value, self.source(name)

    def ignore(self, *names: str, default: str = "") -> None:
        """Accept options that change nothing here; with the default value there is nothing to tell."""
        self.idle += [self._said[name] for name in names if self.value(name, default) != default]

    @property
    def most_nodes(self) -> int:
        """How many nodes at most; 1 where nothing sensible is said of it."""
        return whole(self.value("--nnodes", "1").rpartition(":")[2]) or 1
