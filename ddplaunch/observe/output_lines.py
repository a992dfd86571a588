"""The last line of output of a rank or program."""

from __future__ import annotations

from ddplaunch.base.errors import sanitize_line
from ddplaunch.core.control_socket.request import ServedJob

MAX_LINE_CHARS = 200  # characters of a line
TAIL_BYTES = 4 * MAX_LINE_CHARS  # of an output, in which its last line is


def last_output_line(printed: bytes) -> str:
    """Return the last line of an output that is not blank; for a progress bar, its latest state."""
    lines = printed[-TAIL_BYTES:].decode(errors="replace").replace("\r", "\n").split("\n")
    return sanitize_line(next((line for line in reversed(lines) if line.strip()), ""), MAX_LINE_CHARS)


def last_output_lines(job: ServedJob) -> tuple[tuple[int, str], ...]:
    """Return the last output line of each rank of this node."""
    return tuple((rank, last_output_line(job.streams.tail(rank))) for rank in job.streams.ranks_in_memory())
