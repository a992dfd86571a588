"""The sampling profiler of a rank: records the main thread's stack at each tick, a signal from the launcher.

Loaded by ``profile_side`` when a profile is requested, and bound by its rules. A sampling thread would get the GIL
where the program releases it, and so find native code six times too often (measured); a signal is handled where the
program is. If it arrives in native code, it is handled when that returns, so all ticks since the last one were spent
there. Frames of the program are never kept, and its code objects only until the profile is written. torch's own
profiler runs in addition if requested.
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

    from ddplaunch.core.rank import inspection_endpoint
    from ddplaunch.core.rank.rank_runner import load_private_module
else:
    inspection_endpoint = load_private_module("core/rank/inspection_endpoint")

_MAX_DEPTH = 200  # innermost calls of a stack


class ProfileSampler:
    """Samples the stack of the main thread; one sampler per process, for one profile after another."""

    def __init__(self) -> None:
        self.signal = self._start_ns = self._period_ns = self._ticks = self._max_nodes = 0
        self._path = b""
        self._torch: TorchProfiler | None = None
        self._recorded_ticks = 0
        self._clear()

    def _clear(self) -> None:
        self._codes: dict[int, CodeType] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._runs: list[list[int]] = []  # consecutive ticks at one stack: its number, count

    def prepare(self, line: bytes) -> None:
        """Parse ``p SIGNAL START PERIOD TICKS NODES TORCH PATH``; times on the monotonic clock, in nanoseconds.

        NODES is the maximum number of nodes of the call tree in the result; TORCH is 1 to run torch's profiler, too;
        PATH is the result file.
        """
        numbers = line.split(b" ", 7)
        self.signal, self._start_ns, self._period_ns, self._ticks, self._max_nodes, torch = map(int, numbers[1:7])
        self._path, self._recorded_ticks = numbers[7], 0
        end_ns = self._start_ns + self._ticks * self._period_ns
        if self._torch and (self._torch.is_running or self._torch.path == os.fsdecode(self._path)):
            self._torch.end_ns = end_ns  # all ranks have started it, so the profile begins
        else:
            self._torch = TorchProfiler(os.fsdecode(self._path), end_ns) if torch else None
        self._clear()

    def start(self, frame: FrameType | None) -> None:
        """Start handling ticks, unless the program uses their signal; called in the main thread, at this frame."""
        if _signal.getsignal(self.signal) == _signal.SIG_DFL:
            _signal.signal(self.signal, self.on_tick)
            _signal.siginterrupt(self.signal, False)
        self.on_tick(self.signal, frame)  # the thread may have been in native code since the first tick
        if self._torch:
            self._torch.start()

    def on_tick(self, number: int, frame: FrameType | None) -> None:
        try:
            self._record(frame, (time.monotonic_ns() - self._start_ns) // self._period_ns + 1)
        except Exception:
            pass  # out of memory, or at the recursion limit
        if self._torch and not inspection_endpoint.holds_import_lock(frame):
            self._torch.stop_if_due()

    def _record(self, frame: FrameType | None, due: int) -> None:
        """Attribute the ticks that are ``due`` by now, and not recorded yet, to this frame."""
        count = min(due, self._ticks) - self._recorded_ticks
        if count <= 0:
            return
        self._recorded_ticks += count
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

    def write_result(self, frame: FrameType | None, traces: Iterable[bytes]) -> int:
        """Write the profile, and return its size in bytes.

        The main thread is at this frame; ``traces`` are those of the flight recorders.
        """
        self._record(frame, self._ticks)
        fd = os.open(self._path + b".part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.writelines(line + b"\n" for line in self._format_result())
            file.writelines(b"t " + trace + b"\n" for trace in traces)
            size = file.tell()
        os.rename(self._path + b".part", self._path)
        self._clear()
        return size

    def _format_result(self) -> Iterable[bytes]:
        """Yield the lines of the result.

        These are ``c FUNCTION<tab>FILE`` for each code object, ``n PARENT CODE LINE`` for each node of the call tree,
        and ``r NODE TICKS …`` in order of time.
        """
        codes = {key: number for number, key in enumerate(self._codes)}
        for code in self._codes.values():
            words = [word.replace("\n", " ").replace("\t", " ") for word in (code.co_name, code.co_filename)]
            yield b"c " + "\t".join(words).encode("utf-8", "backslashreplace")
        nodes: dict[tuple[int, int, int], int] = {}
        lines: dict[tuple[int, int], int] = {}
        leaves = []
        for stack in self._stacks:
            parent = 0  # the root; nodes count from 1
            for key, offset in zip(stack[-2::-2], stack[-1::-2]):  # noqa: B905  # of equal length
                line = lines.get((key, offset))
                if line is None:
                    line = lines[key, offset] = _line_at(self._codes[key], offset)
                node = parent, codes[key], line
                if node not in nodes:
                    if len(nodes) >= self._max_nodes:
                        break  # the ticks of deeper calls count for the parent
                    nodes[node] = len(nodes) + 1
                parent = nodes[node]
            leaves.append(parent)
        for parent, code_number, line in nodes:
            yield b"n %d %d %d" % (parent, code_number, line)
        yield b"r " + b" ".join(b"%d %d" % (leaves[which], count) for which, count in self._runs)


def _line_at(code: CodeType, offset: int) -> int:
    for start, end, line in code.co_lines():
        if start <= offset < end:
            return line or code.co_firstlineno
    return code.co_firstlineno


class TorchProfiler:
    """Runs torch.profiler in the main thread until the profile's end, or until the program starts a profiler itself.

    It starts and stops in signal handlers, in the main thread. Stopping it while it is being started kills the process
    (torch 2.13), so ticks are ignored during the start.
    """

    def __init__(self, path: str, end_ns: int) -> None:
        """``path``: result file, without the suffix ``.torch``; ``end_ns``: on the monotonic clock."""
        self.path, self.end_ns = path, end_ns
        self._pid = os.getpid()
        self._was_started = self._busy = False
        self._profiler: Any = None
        self._module: Any = None
        self._original_starts: dict[str, object] = {}  # torch's functions that start a profiler, by name

    @property
    def is_running(self) -> bool:
        return self._profiler is not None

    def start(self) -> None:
        """Start torch.profiler, once, if torch is loaded and the program has no profiler of its own."""
        if self._was_started or self._busy:
            return
        self._was_started = self._busy = True
        state = "failed"
        try:
            if time.monotonic_ns() >= self.end_ns:  # the main thread was in a call all the time
                return
            if "torch" not in sys.modules:
                state = "no torch"
                return
            torch, self._module = sys.modules["torch"], sys.modules["torch.autograd.profiler"]
            starts = {name: getattr(self._module, name) for name in ("_prepare_profiler", "_enable_profiler")}
            if torch._C._autograd._profiler_enabled() or _has_active_profiler(self._module.profile):
                state = "own profiler"
                return
            kinds = torch.profiler.ProfilerActivity
            activities = [kinds.CPU, *([kinds.CUDA] if torch.cuda.is_initialized() else [])]
            profiler = torch.profiler.profile(activities=activities)
            profiler.start()
            self._profiler, self._original_starts = profiler, starts
            for name, start in starts.items():
                setattr(self._module, name, self._wrap_start(start))
            state = "started"
        except Exception:
            pass  # torch is being loaded, or of another version
        finally:
            self._busy = False
            self._write_state(state)

    def _write_state(self, state: str) -> None:
        """Write the state of torch's profiler to a file: the launcher waits for the states of all ranks."""
        try:
            with open(f"{self.path}.state.part", "x", encoding="ascii") as file:
                file.write(state)
            os.rename(f"{self.path}.state.part", f"{self.path}.state")
        except OSError:
            pass  # the disk is full

    def _wrap_start(self, start: Any) -> Any:
        def stop_ours_and_start(*words: Any, **options: Any) -> Any:
            if _thread.get_ident() == sys.modules["threading"].main_thread().ident and os.getpid() == self._pid:
                self.stop()
            return start(*words, **options)

        return stop_ours_and_start

    def stop_if_due(self) -> None:
        """Stop torch.profiler if the profile's end has come."""
        if time.monotonic_ns() >= self.end_ns:
            self.stop()

    def stop(self) -> None:
        """Stop torch.profiler, and write the trace; the program is blocked meanwhile."""
        if not self._profiler or self._busy:
            return
        self._busy = True
        try:
            for name, start in self._original_starts.items():
                setattr(self._module, name, start)
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            part = f"{self.path}.torch.part"
            profiler.export_chrome_trace(part)
            os.rename(part, f"{self.path}.torch")
        except Exception:
            pass  # the disk is full
        finally:
            self._busy = False


def _has_active_profiler(kind: type) -> bool:
    """Whether the program has a profiler without results yet: one in its warmup (``schedule``) would lose them."""
    return any(type(each) is kind and getattr(each, "kineto_results", None) is None for each in gc.get_objects())
