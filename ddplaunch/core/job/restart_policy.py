"""Restart policy: whether and when a job starts again after a failure, and which failures would only repeat."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from ddplaunch.base.errors import EXIT_SIGNAL
from ddplaunch.base.stack_frames import Frame, parse_traceback
from ddplaunch.core.failures import OUT_OF_MEMORY, RankFailure
from ddplaunch.core.job.job_attempt import JobAttempt
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.option_values import RESTART_WORDS
from ddplaunch.core.options import Stopping

MAX_SHORT_ATTEMPTS = 3  # in a row, shorter than --min-uptime: give up after these
MAX_BACKOFF_S = 60.0  # the wait before a restart doubles up to this
PROGRESS_RATIO = 1.2  # an attempt has made progress if it lasted longer than this times the previous one,
PROGRESS_MARGIN_S = 1.0  # plus this
KILLED_CODE = str(EXIT_SIGNAL + signal.SIGKILL)  # of ranks whose zygote was lost

_VARIABLE_PARTS = re.compile(r"0x[0-9a-fA-F]+|\d+")  # addresses, sizes, process ids, ports

_NETWORK_ERROR = (
    r"^(?:\w+\.)*(?:DistBackendError|DistNetworkError|DistStoreError|Connection(?:Reset|Aborted)Error)\b"
    r"|Connection (?:reset|closed) by peer|ncclRemoteError|ncclSystemError|unhandled system error"
    r"|remote process exited or there was a network error"
)
"""Exceptions of torch.distributed and Python, and messages of gloo and NCCL.

Source: torch/csrc/distributed/c10d/NCCLUtils.cpp (getNcclErrorDetailStr), ncclGetErrorString, gloo/transport/tcp.
"""

_OOM_KILLED = rf"(?i)\) is killed by signal: |{OUT_OF_MEMORY}"
"""A killed DataLoader worker (torch/utils/data/_utils/signal_handling.py), or the hint on the OOM killer."""


class RestartDecision(NamedTuple):
    """Restart after ``delay_s`` seconds; None: no restart. ``remark``: why not, for the user."""

    delay_s: float | None
    remark: str | None = None


class RestartPolicy:
    """Decides on restarts by --max-restarts, --restart-on, --restart-backoff and --min-uptime; counts them."""

    def __init__(self, config: JobConfig) -> None:
        self._options, self._folder = config.options[Stopping], config.folder
        self.used = 0
        self._short_attempts = 0  # attempts in a row shorter than --min-uptime
        self._signature: FailureSignature | None = None  # of the latest attempt

    def decide(self, attempt: JobAttempt, uptime: float, *, deadline_passed: bool = False) -> RestartDecision:
        """Decide after a failed attempt of ``uptime`` seconds; ``deadline_passed``: --timeout has expired."""
        options = self._options
        if deadline_passed:
            return RestartDecision(None, "no restart: --timeout has expired")
        self._short_attempts = self._short_attempts + 1 if uptime < options.min_uptime else 0
        if self.used >= options.max_restarts:
            used = f"no restarts left (--max-restarts {options.max_restarts})"
            return RestartDecision(None, used if options.max_restarts else None)
        if (pointless := self._why_pointless(attempt, uptime)) is not None:
            return RestartDecision(None, f"not restarting: {pointless}")
        if self._short_attempts >= MAX_SHORT_ATTEMPTS:
            short = f"{MAX_SHORT_ATTEMPTS} attempts in a row lasted less than {options.min_uptime:g} s (--min-uptime)"
            return RestartDecision(None, f"giving up: {short}")
        self.used += 1
        doubled = options.restart_backoff * 2 ** max(0, self._short_attempts - 1)
        return RestartDecision(min(doubled, max(MAX_BACKOFF_S, options.restart_backoff)))

    def describe_restart(self, wait: float) -> str:
        """The note on the restart that was decided: "restart 1 of 3 in 2 s"."""
        return f"restart {self.used} of {self._options.max_restarts}" + (f" in {wait:g} s" if wait else "")

    def _why_pointless(self, attempt: JobAttempt, uptime: float) -> str | None:
        """Return why another attempt would be pointless by ``--restart-on``, or None."""
        causes = self._options.restart_on.split(",")
        if attempt.first_launcher_failure:  # from outside, as a rank that is killed
            self._signature = None
            return None if {*causes} & {*RESTART_WORDS, KILLED_CODE} else self._describe_not_listed(KILLED_CODE)
        if "any" not in causes and "always" not in causes and (why := self._why_not_listed(attempt, causes)):
            return why
        before, now = self._signature, make_failure_signature(attempt, uptime, self._folder)
        self._signature = now
        if causes != ["always"] and now is not None and now.is_repeat_of(before):
            return f"rank {now.rank} failed at {now.location} in two attempts in a row"
        return None

    def _why_not_listed(self, attempt: JobAttempt, causes: Sequence[str]) -> str | None:
        """Return why ``--restart-on`` does not list this failure, by exit code or as transient; None if it does."""
        codes, cause = [word for word in causes if word != "transient"], attempt.stop_cause
        if cause is not None:  # --on-stall restart requests it; a failed program counts as transient
            listed = not cause.of_program or "transient" in causes or str(cause.code) in codes
            return None if listed else f"{cause.reason}; {self._describe_not_listed(str(cause.code))}"
        assert attempt.failure_report is not None
        first = attempt.failure_report.first
        if str(first.shell_exit_code) in codes or ("transient" in causes and is_transient(first)):
            return None
        how = f"failed with {kind}" if (kind := first.exception_type) else first.reason
        if not codes:
            return f"rank {first.rank} {how}, which is not transient (--restart-on transient)"
        return f"rank {first.rank} {how}; {self._describe_not_listed(str(first.shell_exit_code))}"

    def _describe_not_listed(self, code: str) -> str:
        return f"exit code {code} is not in --restart-on {self._options.restart_on}"


class FailureSignature(Struct, frozen=True):
    """What must be equal in two attempts for "the same failure again"."""

    attempt: int
    world_size: int
    rank: int
    error: str  # type and message, without numbers
    frames: tuple[Frame, ...]  # of the exception, the innermost first
    uptime_s: float  # seconds
    collectives: int | None  # how many the rank had entered; None: unknown, or none

    @property
    def location(self) -> str:
        """The innermost line of the user's own code: "train.py:41"."""
        frame = next((each for each in self.frames if each.own), self.frames[0])
        return f"{frame.file}:{frame.line}"

    def is_repeat_of(self, before: FailureSignature | None) -> bool:
        """Whether the previous attempt failed in the same way, and this attempt made no more progress than it."""
        if before is None or self._key != before._key or self.attempt != before.attempt + 1:
            return False
        if self.collectives is not None and before.collectives is not None:
            return self.collectives <= before.collectives
        return self.uptime_s <= before.uptime_s * PROGRESS_RATIO + PROGRESS_MARGIN_S

    @property
    def _key(self) -> tuple[object, ...]:
        return self.world_size, self.rank, self.error, self.frames


def make_failure_signature(attempt: JobAttempt, uptime: float, folder: str) -> FailureSignature | None:
    """Return the signature of an attempt that failed after ``uptime`` seconds; files are named relative to ``folder``.

    None if the failure predicts nothing: no Python exception with a traceback, a transient or secondary failure, a
    timeout or a time limit.
    """
    report = attempt.failure_report
    if report is None or attempt.stop_cause is not None:
        return None
    first = report.first
    if not (first.message and first.traceback) or first.is_secondary or first.is_timeout or is_transient(first):
        return None
    frames = parse_traceback(first.traceback, folder)
    error = _VARIABLE_PARTS.sub("0", first.message)
    if not frames:
        return None
    return FailureSignature(attempt.number, attempt.world_size, first.rank, error, frames, uptime, first.collectives)


def is_transient(failure: RankFailure) -> bool:
    """Whether a rank failed by a signal, for lack of host memory, or by a network error."""
    if failure.signal is not None:
        return True
    text = f"{failure.message or ''}\n{failure.hint or ''}"
    return bool(re.search(_NETWORK_ERROR, text) or re.search(_OOM_KILLED, text))
