"""The declaration of an option: plain data, used by ``reader`` and, to build click's options, by ``run_command``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Read = Callable[["Option", Any], Any]
"""Converts the text of a value, or the texts of a repeatable option; gets None where there is none."""


class Option:
    """An option, or an argument, which begins without a dash."""

    def __init__(
        self,
        spellings: Sequence[str],
        help: str = "",
        read: Read | None = None,
        *,
        metavar: str | None = None,
        choices: Sequence[str] = (),
        default: str | None = None,
        envvar: str | None = None,
        is_flag: bool = False,
        negative_spelling: str | None = None,
        multiple: bool = False,
        takes_rest: bool = False,
        completion: str | None = None,
    ) -> None:
        """Declare it.

        Args:
            spellings: the longest last; after it, without a dash, the Python name if that differs.
            metavar: the name of its value in the help. choices: the only valid values.
            negative_spelling: the spelling for "no" of a flag with three states: yes, no, unset.
            takes_rest: whether it is the argument that takes all remaining words.
            completion: how a shell completes its value: as "file", "folder" or "any" path.
        """
        self.opts = [each for each in spellings if each.startswith("-")] or list(spellings)
        self.name = spellings[-1].lstrip("-").replace("-", "_")
        self.spellings = spellings
        self.help, self.read, self.metavar, self.choices = help, read, metavar, choices
        self.default, self.envvar = default, envvar
        self.off = negative_spelling
        self.is_flag, self.multiple, self.rest, self.completes = is_flag, multiple, takes_rest, completion

    @property
    def all_spellings(self) -> list[str]:
        return [*self.opts, self.off] if self.off else self.opts

    @property
    def is_argument(self) -> bool:
        return not self.opts[0].startswith("-")


def option_spellings(options: Iterable[Option]) -> dict[str, bool]:
    """Return every spelling of every option, and whether it takes a value."""
    return {name: not option.is_flag for option in options if not option.is_argument for name in option.all_spellings}
