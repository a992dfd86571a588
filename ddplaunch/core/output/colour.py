"""Renders data as text for the terminal: dry run, stacks, failure report, tables."""

from __future__ import annotations

import os


def is_colour_allowed() -> bool:
    """Whether the environment allows colour on a terminal (no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
