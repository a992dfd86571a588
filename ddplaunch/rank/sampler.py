"""Counts where the main thread of a rank is, on ticks at which the launcher signals it, while a profile is taken.

Loaded by ``answers`` when a profile is asked for, and bound by its rules. A thread would get the GIL where the program
lets it go, and so find native code six times too often (measured); a signal is handled where the program is. One that
comes while the main thread is in native code is handled when that returns, so that all ticks since the last one were
spent there. No frame of the program's is held, and its code only until the profile is written. torch's own profiler
runs meanwhile where that is asked for.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]
import _thread
import gc
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CodeType, FrameType
    from typing import Any

_MAX_DEPTH = 200  # calls of a stack, the innermost


class ProfileSampler:
    """The profile of this rank; one a process, for one profile after the other."""

    def __init__(self) -> None:
        self._signal = self._began = self._period = self._ticks = self._most = 0
        self._path = b""
        self._torch: TorchTrace | None = None
        self._taken = 0  # ticks of which it is known where they were spent
        self._clear()

    def _clear(self) -> None:
        self._codes: dict[int, CodeType] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._runs: list[list[int]] = []  # of ticks spent at one stack: which, how many

    def prepare(self, line: bytes) -> None:
        """``line``: ``p SIGNAL BEGAN PERIOD TICKS PLACES TORCH PATH``, times on the monotonic clock, in nanoseconds.

        PLACES is how many places in the tree of calls are told at most; TORCH is 1 where torch's profiler is to run
        too; PATH is the file that tells the result.
        """
        numbers = line.split(b" ", 7)
        self._signal, self._began, self._period, self._ticks, self._most, torch = map(int, numbers[1:7])
        self._path, self._taken = numbers[7], 0
        if not (self._torch and self._torch.is_running):
            ends = self._began + self._ticks * self._period
            self._torch = TorchTrace(os.fsdecode(self._path), ends) if torch else None
        self._clear()

    def start(self, frame: FrameType | None) -> None:
        """Heed the ticks, unless the program has taken their signal; in the main thread, which is at this frame."""
        if _signal.getsignal(self._signal) == _signal.SIG_DFL:
            _signal.signal(self._signal, self.on_tick)
            _signal.siginterrupt(self._signal, False)
        self.on_tick(self._signal, frame)  # it may have been in native code since the first
        if self._torch:
            self._torch.start()

    def on_tick(self, number: int, frame: FrameType | None) -> None:
        try:
            self._record(frame, (time.monotonic_ns() - self._began) // self._period + 1)
        except Exception:
            pass  # no memory, or the program's recursion is as deep as may be
        if self._torch:
            self._torch.stop_if_due()

    def _record(self, frame: FrameType | None, due: int) -> None:
        """The ticks that were ``due`` by now, and have not been taken yet, were spent at this frame."""
        count = min(due, self._ticks) - self._taken
        if count <= 0:
            return
        self._taken += count
        stack: list[int] = []
        while frame is not None and len(stack) < 2 * _MAX_DEPTH:
            code = frame.f_code
            stack += (id(code), frame.f_lasti)
            self._codes.setdefault(id(code), code)
            frame = frame.f_back
        which = self._stacks.setdefault(tuple(stack), len(self._stacks))
        if self._runs and self._runs[-1][0] == which:
            self._runs[-1][1] += count
        else:
            self._runs.append([which, count])

    def write_result(self, frame: FrameType | None, traces: Iterable[bytes]) -> None:
        """Write what was found, where the main thread is at this frame; ``traces`` are the flight recorders'."""
        self._record(frame, self._ticks)
        fd = os.open(self._path + b".part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.writelines(line + b"\n" for line in self._format_result())
            file.writelines(b"t " + trace + b"\n" for trace in traces)
        os.rename(self._path + b".part", self._path)
        self._clear()

    def _format_result(self) -> Iterable[bytes]:
        """``c FUNCTION<tab>FILE`` of each code, ``n PARENT CODE LINE`` of each place, ``r PLACE TICKS …`` in time."""
        codes = {key: number for number, key in enumerate(self._codes)}
        for code in self._codes.values():
            words = [word.replace("\n", " ").replace("\t", " ") for word in (code.co_name, code.co_filename)]
            yield b"c " + "\t".join(words).encode("utf-8", "backslashreplace")
        places: dict[tuple[int, int, int], int] = {}
        lines: dict[tuple[int, int], int] = {}
        ends = []
        for stack in self._stacks:
            at = 0  # the root; places count from 1
            for which, last in zip(stack[-2::-2], stack[-1::-2]):  # noqa: B905  # both are as long
                line = lines.get((which, last))
                if line is None:
                    line = lines[which, last] = _line_at(self._codes[which], last)
                place = at, codes[which], line
                if place not in places:
                    if len(places) >= self._most:
                        break  # what it calls counts as its own
                    places[place] = len(places) + 1
                at = places[place]
            ends.append(at)
        for parent, code_number, line in places:
            yield b"n %d %d %d" % (parent, code_number, line)
        yield b"r " + b" ".join(b"%d %d" % (ends[which], count) for which, count in self._runs)


def _line_at(code: CodeType, last: int) -> int:
    for start, end, line in code.co_lines():
        if start <= last < end:
            return line or code.co_firstlineno
    return code.co_firstlineno


class TorchTrace:
    """torch's own profiler in the main thread, until the profile's end, or until the program starts one itself.

    It begins and ends in handlers of signals: where the program is, not beside it. One that ends in the midst of its
    begin ends the process (torch 2.13), so the ticks that come meanwhile pass by.
    """

    def __init__(self, path: str, ends: int) -> None:
        """``path``: what ``.torch`` is added to; ``ends``: when, on the monotonic clock, in nanoseconds."""
        self._path, self._ends = path, ends
        self._pid = os.getpid()
        self._begun = self._busy = False
        self._profiler: Any = None
        self._module: Any = None
        self._taken: dict[str, Any] = {}  # the functions of torch by which a program starts one, by name

    @property
    def is_running(self) -> bool:
        return self._profiler is not None

    def start(self) -> None:
        """Begin, once, where torch is there and the program has no profiler of its own."""
        if self._begun or self._busy:
            return
        self._begun = self._busy = True
        try:
            torch, self._module = sys.modules["torch"], sys.modules["torch.autograd.profiler"]
            starts = {name: getattr(self._module, name) for name in ("_prepare_profiler", "_enable_profiler")}
            if torch._C._autograd._profiler_enabled() or _has_active_profiler(self._module.profile):
                return
            kinds = torch.profiler.ProfilerActivity
            activities = [kinds.CPU, *([kinds.CUDA] if torch.cuda.is_initialized() else [])]
            profiler = torch.profiler.profile(activities=activities)
            profiler.start()
            self._profiler, self._taken = profiler, starts
            for name, start in starts.items():
                setattr(self._module, name, self._wrap_start(start))
        except Exception:
            pass  # it is not there yet, or another one
        finally:
            self._busy = False

    def _wrap_start(self, start: Any) -> Any:
        def begin(*words: Any, **options: Any) -> Any:
            if _thread.get_ident() == sys.modules["threading"].main_thread().ident and os.getpid() == self._pid:
                self.stop()
            return start(*words, **options)

        return start

    def stop_if_due(self) -> None:
        """End when it is time."""
        if time.monotonic_ns() >= self._ends:
            self.stop()

    def stop(self) -> None:
        """End, and write the trace: the program stands still meanwhile."""
        if not self._profiler or self._busy:
            return
        self._busy = True
        try:
            for name, start in self._taken.items():
                setattr(self._module, name, start)
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            part = f"{self._path}.torch.part"
            profiler.export_chrome_trace(part)
            os.rename(part, f"{self._path}.torch")
        except Exception:
            pass  # the disk is full
        finally:
            self._busy = False


def _has_active_profiler(kind: type) -> bool:
    """Whether the program has a profiler without results: one that is only prepared (``schedule``) would lose them."""
    return any(type(each) is kind and getattr(each, "kineto_results", None) is None for each in gc.get_objects())
