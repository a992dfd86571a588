"""Environment variables with checks: numbers, and variables that must agree. Errors are UsageErrors."""

from __future__ import annotations

from ddplaunch.base.errors import UsageError

IGNORE_HINT = "--cluster none ignores these variables"

MAX_DIGITS = 19  # of a number in 64 bits


class EnvVariables(dict[str, str]):
    """The environment; methods for required variables and numbers raise UsageError."""

    def is_set(self, *names: str) -> bool:
        """Whether all these variables have a value; an empty one counts as unset, as in a shell's ``${NAME:-}``."""
        return all(self.get(name) for name in names)

    def text(self, name: str) -> str:
        if not self.is_set(name):
            raise UsageError(f"{name} is not set, but other variables of the same system are", IGNORE_HINT)
        return self[name]

    def number(self, name: str) -> int:
        return parse_number(self.text(name), name)

    def numbers(self, *names: str) -> list[int]:
        return [self.number(name) for name in names]

    def optional_number(self, name: str) -> int | None:
        return self.number(name) if self.is_set(name) else None

    def consistent_number(self, *names: str) -> int:
        """Return the number that these variables have in common. Raises UsageError if none is set, or they differ."""
        present = [name for name in names if self.is_set(name)]
        if not present:
            what = f"none of {', '.join(names)} is set, but other variables of the same system are"
            raise UsageError(what, IGNORE_HINT)
        first, *others = present
        for other in others:
            if self.number(first) != self.number(other):
                raise contradiction_error(f"{first}={self[first]}", f"{other}={self[other]}")
        return self.number(first)


def parse_number(value: str, name: str) -> int:
    """Parse a number from 0 up. Raises UsageError if it is not one."""
    if not (value.isascii() and value.isdecimal() and len(value) <= MAX_DIGITS):
        raise UsageError(f"{name}={value} is not a number", IGNORE_HINT)
    return int(value)


def contradiction_error(one: str, other: str) -> UsageError:
    """Build the error for two values that contradict each other."""
    return UsageError(f"{one} and {other} contradict each other", IGNORE_HINT)


def check_below(index: int, count: int, index_name: str, count_name: str) -> None:
    """Check that an index is below its count. Raises UsageError if not."""
    if index >= count:
        raise contradiction_error(f"{index_name}={index}", f"{count_name}={count}")
