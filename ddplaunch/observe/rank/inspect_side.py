"""Answers inspections in a rank: its stacks, its progress in collectives, the exception that it handles.

The progress is reported by the endpoint's thread, from the first ``init_process_group`` or call by RPC on: torch's
flight recorder has it, on every backend (torch._C._distributed_c10d). What this torch lacks is left out. It runs in
ranks, by the rules of ``core/rank/rank_runner.py``.

Lines from the rank: ``h FIRST SECOND FD`` at its start (``stacks``), ``x LEFT`` if the program has taken one of the
signals or both, replies ``s7 …`` with tab-separated parts. To the rank: ``s7`` (progress) and ``e7`` (also the last
collectives), with the request's number; ``n``: record the exception being handled (``in_flight``); ``w MAX PATH``:
write the dump of the flight recorder.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CellType, FrameType, ModuleType
    from typing import Any

    from ddplaunch.core.rank import inspection_endpoint
    from ddplaunch.core.rank.rank_runner import RankRunner, load_private_module
    from ddplaunch.observe.rank import spawned_children, stacks
else:
    inspection_endpoint = load_private_module("core/rank/inspection_endpoint")
    spawned_children = load_private_module("observe/rank/spawned_children")
    stacks = load_private_module("observe/rank/stacks")

_C10D = "torch.distributed.distributed_c10d"
_RPC, _RPC_FUNCTIONS = "torch.distributed.rpc.api", ("remote", "rpc_sync", "rpc_async", "shutdown")


class Side:
    """The inspection feature's part in a rank: replies to inspections, and prepares stack dumps."""

    def __init__(self, rank: RankRunner, in_flight_file: str, trace_file: str, trace_min_age_s: float) -> None:
        """``in_flight_file`` and ``trace_file``: the paths of files that the rank writes, each "" for none."""
        assert rank.endpoint is not None
        self._endpoint, self._in_flight_file = rank.endpoint, in_flight_file
        self._trace_file, self._trace_min_age_s = trace_file, trace_min_age_s
        self._stacks: stacks.StackWriter | None = None
        self._in_flight: Any = None  # once the exception being handled was requested
        self._module: ModuleType | None = None  # torch.distributed.distributed_c10d, once there is a process group
        self._state: Any = None  # the module torch_state, from then on
        self._group_created = 0.0  # monotonic time of the first process group

    def begin(self) -> None:
        endpoint = self._endpoint
        endpoint.before_request = self._report_lost_signals
        endpoint.set_handler(b"se", self._on_state_request)
        endpoint.set_handler(b"n", lambda line, frame: self._note_exception())
        endpoint.set_handler(b"w", self._on_recorder_dump_request)
        try:
            self._stacks = stacks.StackWriter(endpoint)
            endpoint.send(b"h %d %d %d" % (self._stacks.first, self._stacks.second, self._stacks.fd))
            inspection_endpoint.call_after_import(_C10D, "init_process_group", self._wrap_init_process_group)
            inspection_endpoint.call_after_import(_RPC, "_enable_rpc_profiler", self._wrap_rpc)
            inspection_endpoint.call_after_import(
                spawned_children.MODULE, spawned_children.LAST_NAME, self._prepare_children
            )
        except Exception:
            pass  # the launcher reports that the rank gives no reply

    def done(self) -> None:
        """Write torch's record of the last collectives, if the first process group was created long enough ago.

        It takes up to 0.4 s, which is acceptable in a long run only. Write errors are ignored.
        """
        try:
            if not (self._trace_file and self._group_created and os.getpid() == self._endpoint.pid):
                return
            if time.monotonic() - self._group_created >= self._trace_min_age_s:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(self._trace_file, flags, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.write(b"\n".join(self._state.traces(details=True)))
        except Exception:
            pass

    def leave(self) -> None:
        if self._stacks is not None:
            self._stacks.stop()

    # ----------------------------------------------------------------------------------------------------- requests

    def _report_lost_signals(self) -> None:
        if self._stacks is not None and self._stacks.first and (left := self._stacks.count_handled_signals()) < 2:
            self._endpoint.send(b"x %d" % left)

    def _note_exception(self) -> None:
        """Record the exception that the main thread is handling."""
        try:
            if self._in_flight_file and self._in_flight is None:
                module = load_private_module("observe/rank/in_flight")
                self._in_flight = module.HandledExceptionWriter(self._in_flight_file, self._endpoint.main_thread)
            if self._in_flight is not None:
                self._in_flight.note()
        except Exception:
            pass  # the program has used up its descriptors

    def _on_state_request(self, line: bytes, frame: FrameType | None) -> None:
        if frame is None:
            self._note_exception()
            self._endpoint.send(line + b" " + self._build_reply(details=line.startswith(b"e")))

    def _on_recorder_dump_request(self, line: bytes, frame: FrameType | None) -> None:
        try:
            if frame is None:
                _, limit, path = line.split(b" ", 2)
                self._state.write_flight_recorder_dump(os.fsdecode(path), int(limit))
        except Exception:
            pass  # the disk is full, or the folder was removed

    def _build_reply(self, *, details: bool) -> bytes:
        """Build the reply to an inspection: what ``torch_state`` describes, and the outer frames of a deep stack.

        With ``details`` the reply has all frames, for a rank that gets no signal because it waits for one.
        """
        initialised, groups, call, *traces = self._state.describe(self._module, details=details)
        outer = stacks.format_outer_frames(
            sys._current_frames().get(self._endpoint.main_thread), 0 if details else stacks.MAX_FRAMES
        )
        call += outer and b"|" + outer.replace(b"\t", b" ").replace(b"\n", b"\r")
        return b"\t".join([initialised, groups, call, *traces])

    def _prepare_children(self, module: ModuleType) -> None:
        if self._stacks is not None and self._stacks.first and os.getpid() == self._endpoint.pid:
            spawned_children.prepare_children(module, self._stacks.first, self._stacks.second, self._stacks.fd)

    # ------------------------------------------------------------------------------------------- the one-shot hook

    def _wrap_init_process_group(self, module: ModuleType) -> None:
        _hook_first_call(module, "init_process_group", lambda: self._on_first_group(module))

    def _wrap_rpc(self, module: ModuleType) -> None:
        for name in _RPC_FUNCTIONS:
            _hook_first_call(module, name, self._on_rpc)

    def _on_first_group(self, module: ModuleType) -> None:
        if os.getpid() == self._endpoint.pid:
            self._group_created = time.monotonic()
            self._start_thread(module)

    def _on_rpc(self) -> None:
        if os.getpid() == self._endpoint.pid:
            self._start_thread(sys.modules[_C10D])

    def _start_thread(self, module: ModuleType) -> None:
        if self._state is None:
            self._module = module
            self._state = load_private_module("observe/rank/torch_state")
            self._endpoint.start_thread(lambda: self._state.has_torch_threads(module))


def _hook_first_call(module: ModuleType, name: str, callback: Callable[[], None]) -> None:
    """Replace a function, until its first call, in the closure of its decorator: no attribute of a module changes."""
    for cell in getattr(getattr(module, name, None), "__closure__", None) or ():
        found = cell.cell_contents
        if getattr(found, "__name__", "") == name:
            cell.cell_contents = _FirstCallHook(cell, found, callback)


class _FirstCallHook:
    """Replacement of a function until its first call; it adds no frame to the stack of that call.

    The interpreter looks ``__call__`` up before a call, and the property acts then (slot_tp_call in
    Objects/typeobject.c).
    """

    def __init__(self, cell: CellType, function: Callable[..., Any], callback: Callable[[], None]) -> None:
        self._cell, self._function, self._callback = cell, function, callback
        self.__name__ = function.__name__

    @property
    def __call__(self) -> Callable[..., Any]:
        self._cell.cell_contents = self._function
        try:
            self._callback()
        except Exception:
            pass  # no thread can be started: only stacks are available then
        return self._function
