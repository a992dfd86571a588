"""Whether and when a job starts again after a failure: that may pass by itself, or has come twice in the same way, as a
third would.
"""

from __future__ import annotations

import os
import re

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.control.attempt import JobAttempt
from ddplaunch.control.failure import OUT_OF_MEMORY, RankFailure
from ddplaunch.control.rules import JobConfig
from ddplaunch.dataclass import dataclass

if TYPE_CHECKING:
    from ddplaunch.diagnosis.inspection import Frame

MAX_SHORT_ATTEMPTS = 3  # give up after so many attempts in a row that were shorter than ``min_uptime``
MAX_BACKOFF_S = 60.0  # seconds beyond which the wait before a restart does not double any more
PROGRESS_RATIO = 1.2  # times as long, and
PROGRESS_MARGIN_S = 1.0  # seconds more: an attempt that lasted longer than both together has got further

_VARIABLE_PARTS = re.compile(r"0x[0-9a-fA-F]+|\d+")  # addresses, sizes, process ids, ports

_NETWORK_ERROR = (
    r"^(?:\w+\.)*(?:DistBackendError|DistNetworkError|DistStoreError|Connection(?:Reset|Aborted)Error)\b"
    r"|Connection (?:reset|closed) by peer|ncclRemoteError|ncclSystemError|unhandled system error"
    r"|remote process exited or there was a network error"
)
"""Exceptions of torch.distributed and Python, and words of gloo and NCCL.

Source: torch/csrc/distributed/c10d/NCCLUtils.cpp (getNcclErrorDetailStr), ncclGetErrorString, gloo/transport/tcp.
"""

_OOM_KILLED = rf"(?i)\) is killed by signal: |{OUT_OF_MEMORY}"
"""A worker of a DataLoader (torch/utils/data/_utils/signal_handling.py), and what the kernel adds."""


@dataclass(frozen=True)
class RestartDecision:
    """Start again after ``delay_s`` seconds or, where that is None, do not; ``remark`` says why if it needs saying."""

    delay_s: float | None
    remark: str | None = None


class RestartPolicy:
    """Counts what has been used up."""

    def __init__(self, rules: JobConfig) -> None:
        self._rules = rules
        self.used = 0
        self._quick = 0  # attempts in a row that were shorter than ``min_uptime``
        self._mode: FailureSignature | None = None  # in which the latest attempt failed

    def decide(self, attempt: JobAttempt, uptime: float, *, deadline_passed: bool = False) -> RestartDecision:
        """Decide after an attempt that failed when its ranks had lived for ``uptime_s`` seconds; ``deadline_passed`` is too late."""
        rules = self._rules
        if deadline_passed:
            return RestartDecision(None, "no restart: the time of the job is over (--timeout)")
        self._quick = self._quick + 1 if uptime < rules.min_uptime else 0
        if self.used >= rules.max_restarts:
            used = f"no restart is left: all {rules.max_restarts} were used"
            return RestartDecision(None, used if rules.max_restarts else None)
        if (futile := self._why_pointless(attempt, uptime)) is not None:
            return RestartDecision(None, f"{futile}: not restarted")
        if self._quick >= MAX_SHORT_ATTEMPTS:
            short = f"{MAX_SHORT_ATTEMPTS} attempts in a row lasted less than {rules.min_uptime:g} s (--min-uptime)"
            return RestartDecision(None, f"giving up: {short}")
        self.used += 1
        doubled = rules.restart_backoff * 2 ** max(0, self._quick - 1)
        return RestartDecision(min(doubled, max(MAX_BACKOFF_S, rules.restart_backoff)))

    def describe_restart(self, wait: float) -> str:
        """What people read of the restart that was decided: "restart 1 of 3 in 2 s"."""
        return f"restart {self.used} of {self._rules.max_restarts}" + (f" in {wait:g} s" if wait else "")

    def _why_pointless(self, attempt: JobAttempt, uptime: float) -> str | None:
        """Why another attempt would be in vain, by ``--restart-on``."""
        if attempt.first_launcher_failure:  # from outside, as a rank that is killed
            self._mode = None
            return None
        if self._rules.restart_on == "transient" and attempt.time_limit is None:
            assert attempt.failure_report is not None
            first = attempt.failure_report.first
            if not is_transient(first):
                how = f"failed with {kind}" if (kind := first.exception_type) else first.reason
                return f"rank {first.rank} {how}, which is not transient (--restart-on transient)"
        before, self._mode = self._mode, failure_signature(attempt, uptime)
        if self._rules.restart_on != "always" and self._mode is not None and self._mode.is_repeat_of(before):
            return f"rank {self._mode.rank} failed at {self._mode.location} twice in the same way"
        return None


@dataclass(frozen=True)
class FailureSignature:
    """How an attempt failed, as far as the next is compared with it."""

    attempt: int
    world_size: int
    rank: int
    error: str  # type and message, without numbers
    frames: tuple[Frame, ...]  # of the exception, the innermost first
    uptime_s: float  # seconds
    collectives: int | None  # that the rank had entered; None where it is not known, or none

    @property
    def location(self) -> str:
        """The innermost line of the user's own code: "train.py:41"."""
        frame = next((each for each in self.frames if each.own), self.frames[0])
        return f"{frame.file}:{frame.line}"

    def is_repeat_of(self, before: FailureSignature | None) -> bool:
        """Whether it is the same failure as in the attempt before, and nothing more was done until it came."""
        if before is None or self._key != before._key or self.attempt != before.attempt + 1:
            return False
        if self.collectives is not None and before.collectives is not None:
            return self.collectives <= before.collectives
        return self.uptime_s <= before.uptime_s * PROGRESS_RATIO + PROGRESS_MARGIN_S

    @property
    def _key(self) -> tuple[object, ...]:
        return self.world_size, self.rank, self.error, self.frames


def failure_signature(attempt: JobAttempt, uptime: float) -> FailureSignature | None:
    """How an attempt failed that lived for ``uptime_s`` seconds.

    None where its end says nothing about the next: it was no exception of Python's with a traceback, it may pass by
    itself, or it only tells of a peer, or of a time limit.
    """
    verdict = attempt.failure_report
    if verdict is None or attempt.time_limit is not None:
        return None
    first = verdict.first
    if not (first.message and first.traceback) or first.is_secondary or first.is_timeout or is_transient(first):
        return None
    frames = diagnosis.stack_dump.parse_traceback(first.traceback, os.getcwd())
    error = _VARIABLE_PARTS.sub("0", first.message)
    if not frames:
        return None
    return FailureSignature(attempt.number, attempt.world_size, first.rank, error, frames, uptime, first.collectives)


def is_transient(failure: RankFailure) -> bool:
    """Whether a rank ended by a signal, by the host's want of memory, or by an error of the network."""
    if failure.signal is not None:
        return True
    said = f"{failure.message or ''}\n{failure.hint or ''}"
    return bool(re.search(_NETWORK_ERROR, said) or re.search(_OOM_KILLED, said))
