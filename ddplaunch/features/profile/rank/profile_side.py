"""Starts and ends profiles of a rank on request; the sampler is loaded at the first one.

Requests are ``p …`` and ``q`` (``profile_sampler``); the ticks between them are signals. A profile starts in the main
thread, at the wake signal. Bound by the rules of ``core/rank/rank_runner.py``.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]  # signal without its enums
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

    from ddplaunch.core.rank import inspection_endpoint
    from ddplaunch.core.rank.rank_runner import RankRunner, load_private_module
else:
    inspection_endpoint = load_private_module("core/rank/inspection_endpoint")


class Side:
    """Takes the profiles of one rank."""

    def __init__(self, rank: RankRunner) -> None:
        assert rank.endpoint is not None
        self._endpoint = rank.endpoint
        self._sampler: Any = None  # of the current profile

    def begin(self) -> None:
        self._endpoint.set_handler(b"pq", self._on_request)
        self._endpoint.on_wake.append(self._on_wake)
        free = inspection_endpoint.list_free_signals()  # the last one: the first ones are those of other features
        self._endpoint.report_signal("profile", free[-1] if free else 0, is_used=False)

    def leave(self) -> None:
        if self._sampler is not None and _signal.getsignal(self._sampler.signal) == self._sampler.on_tick:
            _signal.signal(self._sampler.signal, _signal.SIG_IGN)

    def _on_wake(self, frame: FrameType | None) -> None:
        if self._sampler is not None:
            self._sampler.start(frame)

    def _on_request(self, line: bytes, frame: FrameType | None) -> None:
        """Called on a request, in the main thread or, without a frame, in the endpoint's: start or end a profile."""
        try:
            if not self._endpoint.can_wake():
                return
            if line[:1] == b"p":
                if self._sampler is None:
                    self._sampler = load_private_module("features/profile/rank/profile_sampler").ProfileSampler()
                self._sampler.prepare(line)
                if not frame:
                    self._endpoint.wake_main_thread()
            elif self._sampler is not None:
                state = load_private_module("observe/rank/torch_state")
                at = frame or sys._current_frames().get(self._endpoint.main_thread)
                size = self._sampler.write_result(at, [] if frame else state.traces(details=True))
                self._endpoint.bytes_written += size
        except Exception:
            pass  # the disk is full
