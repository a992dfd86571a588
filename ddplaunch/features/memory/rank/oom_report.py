"""CUDA out-of-memory reports (``--oom-report``): the largest allocations by source line, and a memory snapshot.

torch records the stack of each allocation for this. torch.cuda is not initialised: the setup is queued in torch's own
``_lazy_call`` queue. Bound by the rules of ``core/rank/rank_runner.py``.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from ddplaunch.core.rank import inspection_endpoint, rank_exit
    from ddplaunch.core.rank.rank_runner import RankRunner, load_private_module
else:
    inspection_endpoint = load_private_module("core/rank/inspection_endpoint")
    rank_exit = load_private_module("core/rank/rank_exit")

MAX_HISTORY_EVENTS = 100_000  # in the snapshot's history: a few hundred bytes each
MAX_SNAPSHOTS = 10  # a program may catch the error and retry with smaller batches
_MAX_LINES = 3  # source lines in the report


class Side:
    """Observer of torch's CUDA allocator, one per process: writes the report when GPU memory is exhausted."""

    def __init__(self, rank: RankRunner, snapshot: str, summary: str) -> None:
        """``snapshot`` and ``summary``: the files to write."""
        self._rank, self._snapshot, self._summary = rank.job["rank"], snapshot, summary
        self._pid, self._count = os.getpid(), 0

    def begin(self) -> None:
        inspection_endpoint.call_after_import("torch.cuda", "_lazy_call", self._queue_setup)

    def _queue_setup(self, cuda: ModuleType) -> None:
        """Called once torch.cuda is imported: queue the setup, which torch runs when the program initialises CUDA."""
        cuda._lazy_call(self._start)

    def _start(self) -> None:
        try:
            torch = sys.modules["torch"]
            attach = torch._C._cuda_attach_out_of_memory_observer
            torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=MAX_HISTORY_EVENTS
            )
            attach(self._on_oom)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            os.write(2, f"ddplaunch: --oom-report does not work on rank {self._rank}: {text}\n".encode())

    def _on_oom(self, device: int, wanted: int, total: int, free: int) -> None:
        """Called by torch's allocator before it raises OutOfMemoryError, which an exception here would replace."""
        try:
            if os.getpid() != self._pid:
                return
            snapshot = sys.modules["torch"].cuda.memory._snapshot()
            blocks = list(_list_allocated_blocks(snapshot, device))
            used = sum(size for size, _ in blocks)
            lines = [
                f"rank {self._rank} requested {_format_size(wanted)} on cuda:{device} ({_format_size(free)} "
                f"of {_format_size(total)} free); its tensors use {_format_size(used)}{self._current_line()}",
                f"largest by line: {self._describe_largest_lines(blocks)}" if blocks else "",
                self._save_snapshot(snapshot),
            ]
            fd = os.open(self._summary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write("\n".join(filter(None, lines)).encode(errors="replace"))
        except Exception:
            pass

    def _current_line(self) -> str:
        """Return the innermost line of the user's code at the allocation: "; at train.py:31"."""
        main = sys._current_frames().get(sys.modules["threading"].main_thread().ident)
        for frame in (sys._getframe(), main):  # in backward an autograd thread allocates, and the main thread waits
            while frame is not None:
                if rank_exit.is_user_file(frame.f_code.co_filename):
                    return f"; at {_format_line(frame.f_code.co_filename, frame.f_lineno)}"
                frame = frame.f_back
        return ""

    def _describe_largest_lines(self, blocks: list[tuple[int, Any]]) -> str:
        """Describe the lines of the user's code that allocated most: total size and number of blocks of each."""
        totals: dict[str, tuple[int, int]] = {}
        for size, frames in blocks:
            place = "backward or library code"  # autograd's threads have no frame of the user's code
            for frame in frames:  # the innermost comes first
                if rank_exit.is_user_file(frame["filename"]):
                    place = f"{_format_line(frame['filename'], frame['line'])} ({frame['name']})"
                    break
            previous, count = totals.get(place, (0, 0))
            totals[place] = previous + size, count + 1
        largest = sorted(totals.items(), key=lambda item: -item[1][0])
        parts = [f"{_format_size(size)} in {count} by {place}" for place, (size, count) in largest[:_MAX_LINES]]
        if rest := largest[_MAX_LINES:]:
            parts.append(f"{_format_size(sum(size for _, (size, _) in rest))} by {len(rest)} other lines")
        return ", ".join(parts)

    def _save_snapshot(self, snapshot: object) -> str:
        self._count += 1
        if self._count > MAX_SNAPSHOTS:
            return f"snapshot of an earlier failure: {self._snapshot}"
        draft = f"{self._snapshot}.{self._pid}"
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                sys.modules["pickle"].dump(snapshot, file)  # imported by torch
            os.replace(draft, self._snapshot)
        except OSError as error:
            try:
                os.unlink(draft)
            except OSError:
                pass
            return f"cannot write the snapshot to {self._snapshot}: {error.strerror}"
        return f"snapshot, for https://pytorch.org/memory_viz: {self._snapshot}"


def _list_allocated_blocks(snapshot: Any, device: int) -> Any:
    """Yield size and stack frames of each block in use on a device."""
    for segment in snapshot["segments"]:
        if segment.get("device", device) == device:
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    yield block["size"], block.get("frames") or ()


def _format_line(file: str, line: int) -> str:
    return f"{rank_exit.relative_path(file)}:{line}"


def _format_size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
