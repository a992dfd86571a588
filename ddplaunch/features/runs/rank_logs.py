"""Reads the output of a run's ranks: from its --log-dir, from the history, or from the running launcher."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from typing import BinaryIO, NamedTuple

from ddplaunch.base.errors import LaunchError, sanitize_line
from ddplaunch.cli import client
from ddplaunch.core.output.times import offset_since, parse_marks, times_file
from ddplaunch.features.runs.output_request import TailOutputRequest, last_lines
from ddplaunch.observe.history import history_store
from ddplaunch.observe.history.run_record import RunRecord

CHUNK = 1 << 16

_NAME = re.compile(r"rank-(\d+)(?:\.attempt-(\d+))?\.log")


def rank_log_files(run: str) -> dict[int, list[str]]:
    """List the output files of each rank, the first attempt's first; none if there is none on this machine."""
    return _files(_log_dirs(run))


def get_attempt_number(path: str) -> int:
    """Return the number of the attempt in the name of a log file; 0 if it has none."""
    found = _NAME.fullmatch(os.path.basename(path))
    return int(found[2] or 0) if found else 0


def _log_dirs(run: str) -> list[str]:
    return [record.log_dir for record in history_store.read_node_records(run) if record.log_dir] or [
        history_store.run_dir(run)
    ]


def _files(folders: Sequence[str]) -> dict[int, list[str]]:
    files: dict[int, list[tuple[int, str]]] = {}
    for folder in folders:
        with suppress(OSError):
            for name in os.listdir(folder):
                if match := _NAME.fullmatch(name):
                    files.setdefault(int(match[1]), []).append((int(match[2] or 0), os.path.join(folder, name)))
    return {rank: [path for _, path in sorted(paths)] for rank, paths in sorted(files.items())}


class OutputPart(NamedTuple):
    """The part of the output to show: with neither field given, all output of the last attempt."""

    lines: int = 0  # the last lines of the last attempt
    since: float | None = None  # output since a moment, in all attempts


def _find_offset_since(path: str, moment: float) -> int:
    """Return the offset in a log file of the output since a moment; raise LaunchError if its times are unknown."""
    size = os.path.getsize(path)
    try:
        with open(times_file(path), "rb") as file:
            marks = parse_marks(file.read())
    except OSError:
        marks = []
    if size and not marks:
        raise LaunchError(f"--since does not work here: {sanitize_line(times_file(path))} is missing or empty")
    start = offset_since(marks, moment)
    return size if start is None else min(max(start, 0), size)


def failed_ranks(record: RunRecord) -> list[int]:
    """List the failed ranks of the last attempt with failures, the first cause first."""
    verdicts = [each.verdict for each in record.attempts if each.verdict] + [record.verdict]
    verdict = next(filter(None, reversed(verdicts)), None)
    if verdict is None:
        return []
    return [verdict.first.rank, *verdict.alike, *(each.rank for each in verdict.others)]


def read_stored_output(
    paths: Mapping[int, Sequence[str]], ranks: Sequence[int], part: OutputPart
) -> Iterator[tuple[int, bytes]]:
    """Yield a part of the output of these ranks, one rank after the other."""
    for rank in ranks:
        with closing(_TailedFile()) as tail:
            yield from ((rank, data) for data in tail.read(paths[rank], part))


def read_last_lines(file: BinaryIO, lines: int) -> bytes:
    """Read the last ``lines`` lines of a file, which may be large."""
    size, span = os.fstat(file.fileno()).st_size, CHUNK
    while True:
        file.seek(max(0, size - span))
        data = file.read()
        if span >= size or data.count(b"\n") > lines:
            return last_lines(data, lines)
        span *= 4


def read_live_output(path: str, ranks: Sequence[int], part: OutputPart, *, follow: bool) -> Iterator[tuple[int, bytes]]:
    """Yield the output of these ranks from the launcher's memory; ``follow``: and further output, to the job's end.

    Raises JobEnded, before the first piece, if the job has ended.
    """
    for piece in client.stream_replies(path, TailOutputRequest(tuple(ranks), follow, part.lines, part.since)):
        if piece.missed:
            yield piece.rank, f"\n… {piece.missed} bytes left out: they came faster than they were read …\n".encode()
        yield piece.rank, piece.data


def follow_files(run: str, path: str, ranks: Sequence[int], part: OutputPart) -> Iterator[tuple[int, bytes]]:
    """Yield a part of the log files of these ranks, and what is appended to them until the job ends.

    The launcher announces new output, so the files are not polled.
    """
    folders = _log_dirs(run)
    known = _files(folders)
    with ExitStack() as stack:
        tails = {rank: stack.enter_context(closing(_TailedFile())) for rank in ranks or known}
        for rank, tail in tails.items():
            yield from ((rank, data) for data in tail.read(known.get(rank, []), part))
        with suppress(client.JobEnded):  # the job has ended while the files were read
            for piece in client.stream_replies(path, TailOutputRequest(tuple(ranks), follow=True)):
                if piece.rank not in tails:
                    tails[piece.rank] = stack.enter_context(closing(_TailedFile()))
                now = _files(folders).get(piece.rank, [])
                yield from ((piece.rank, data) for data in tails[piece.rank].read(now))
        known = _files(folders)
        for rank, tail in tails.items():
            yield from ((rank, data) for data in tail.read(known.get(rank, [])))


class _TailedFile:
    """Reads a rank's files, one for each attempt, as they grow."""

    def __init__(self) -> None:
        self._path: str | None = None
        self._file: BinaryIO | None = None

    def read(self, paths: Sequence[str], part: OutputPart | None = None) -> Iterator[bytes]:
        """Yield new data of the current file, then the later files; on the first call only ``part`` of their data.

        Raises LaunchError if the times of a file are unknown.
        """
        yield from self._read_new()
        later = paths[paths.index(self._path) + 1 :] if self._path in paths else paths
        for path in later[-1:] if part and part.since is None else later:
            try:
                file = open(path, "rb")  # noqa: SIM115
            except OSError:
                continue
            self.close()
            self._path, self._file = path, file
            if part and part.lines:
                yield read_last_lines(file, part.lines)
                return  # what has been appended meanwhile would be more lines
            if part and part.since is not None:
                file.seek(_find_offset_since(path, part.since))
            yield from self._read_new()

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _read_new(self) -> Iterator[bytes]:
        while self._file and (data := self._file.read(CHUNK)):
            yield data
