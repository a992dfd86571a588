"""What people see: the layout, stacks, the failure report, tables of text. Facts come in as data, text goes out."""

from __future__ import annotations

import os


def is_colour_allowed() -> bool:
    """Whether the user lets a terminal have colour at all (no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
