"""Text from another machine, as it may stand in a message of ours."""

from __future__ import annotations


def shown(text: str, most: int) -> str:
    """Return the text on one line, without control characters, and no longer than ``most`` letters."""
    plain = "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text).strip()
    return plain if len(plain) <= most else plain[: most - 1] + "…"
