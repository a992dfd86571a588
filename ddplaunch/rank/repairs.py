"""What imported modules know of the process that imported them, made right in a rank."""

from __future__ import annotations


def apply() -> None:
    """In a rank that has its variables."""
