"""Text from another machine, as it may stand in a message of ours."""

from __future__ import annotations


def shown(text: str, most: int) -> str:
    """Return the text on one line, without control characters, and no longer than ``most`` letters."""
    start = text.strip()[: most + 1]  # a letter stays a letter, so no more is looked at
    plain = "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in start)
    return plain if len(plain) <= most else plain[: most - 1] + "…"
