"""An option as it is declared: plain data, which ``reader`` reads by, and ``run_command`` makes click's own of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ddplaunch import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    Read = Callable[["Option", Any], Any]
    """Reads the text of a value, or of all values of an option that may be repeated; None where there is no text."""


class Option:
    """An option, or, without a dash, an argument."""

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
            spellings: the longest last; behind it, without a dash, Python's name where that is another one.
            metavar: what the help calls its value; choices: the only values that it may have.
            negative_spelling: the spelling that says no, of a flag that is neither yes nor no by default.
            takes_rest: whether it is the argument that takes all words that are left.
            completion: what a shell completes its value as: "file", "folder" or "any" path.
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
    """Every spelling of every option, and whether it takes a value."""
    return {name: not option.is_flag for option in options if not option.is_argument for name in option.all_spellings}
