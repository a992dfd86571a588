"""The variables of a process, which say what is wrong with their values: numbers, and pairs that must agree."""

from __future__ import annotations

from ddplaunch.errors import UsageError

OFF = "--cluster none ignores these variables"

MAX_DIGITS = 19  # of a number in 64 bits


class Variables(dict[str, str]):
    """The environment. What must be there, and be a number, raises UsageError where it is not."""

    def is_set(self, *names: str) -> bool:
        """Whether all of them have a value; an empty one counts as unset, as in a shell's ``${NAME:-}``."""
        return all(self.get(name) for name in names)

    def text(self, name: str) -> str:
        if not self.is_set(name):
            raise UsageError(f"{name} is not set, but other variables of the same system are", OFF)
        return self[name]

    def number(self, name: str) -> int:
        return to_number(self.text(name), name)

    def numbers(self, *names: str) -> list[int]:
        return [self.number(name) for name in names]

    def number_if_set(self, name: str) -> int | None:
        return self.number(name) if self.is_set(name) else None

    def agreed(self, *names: str) -> int:
        """The number of those of them that are set. Raises UsageError if none is set, or they differ."""
        present = [name for name in names if self.is_set(name)]
        if not present:
            raise UsageError(f"none of {', '.join(names)} is set, but other variables of the same system are", OFF)
        first, *others = present
        for other in others:
            if self.number(first) != self.number(other):
                raise contradiction(f"{first}={self[first]}", f"{other}={self[other]}")
        return self.number(first)


def to_number(value: str, name: str) -> int:
    """Read a number of 0 or more. Raises UsageError if it is not one."""
    if not (value.isascii() and value.isdecimal() and len(value) <= MAX_DIGITS):
        raise UsageError(f"{name}={value} is not a number", OFF)
    return int(value)


def contradiction(one: str, other: str) -> UsageError:
    """Say which two statements cannot both be true."""
    return UsageError(f"{one} and {other} contradict each other", OFF)


def check_below(index: int, count: int, index_name: str, count_name: str) -> None:
    """Check that an index counts from 0 and stops short of its count. Raises UsageError if it does not."""
    if index >= count:
        raise contradiction(f"{index_name}={index}", f"{count_name}={count}")
