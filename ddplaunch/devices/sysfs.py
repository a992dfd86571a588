"""One value of one kernel file. What the values mean is for the readers beside this one."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str | None:
    """Return what the file says, stripped; None where it is absent or may not be read.

    A driver may also fail the read itself, for a GPU off its bus or outside of our cgroup; that is an OSError too.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """Return the number in the file, decimal or 0x…; None where there is none."""
    try:
        return int(read_text(path) or "", base=0)
    except ValueError:
        return None
