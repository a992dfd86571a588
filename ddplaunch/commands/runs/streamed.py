"""Lines of several ranks, each behind its rank, or as JSON; those of one rank alone as they came."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator


def streamed(pieces: Iterable[tuple[int, bytes]], *, prefix: bool, as_json: bool) -> Iterator[bytes]:
    """Make output of pieces of ranks' output, whole lines at a time where there is a ``prefix`` or JSON."""
    begun: dict[int, bytes] = {}  # lines that have no end yet
    for rank, data in pieces:
        if not prefix and not as_json:
            yield data
            continue
        *lines, rest = (begun.pop(rank, b"") + data).split(b"\n")
        if len(rest) > MAX_LINE:
            lines, rest = [*lines, rest], b""
        if rest:
            begun[rank] = rest
        if lines:
            yield b"".join(_line(rank, line, as_json=as_json) for line in lines)
    for rank, rest in begun.items():
        yield _line(rank, rest, as_json=as_json)


MAX_LINE = 1 << 20  # bytes, of which a longer line is made two


def _line(rank: int, line: bytes, *, as_json: bool) -> bytes:
    if as_json:
        return json.dumps({"rank": rank, "line": line.decode(errors="replace")}).encode() + b"\n"
    return b"[%d] %s\n" % (rank, line)
