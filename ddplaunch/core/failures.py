"""Rank failures: their description, which of them was the first cause, the failure report and the job result."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_SIGNAL, sanitize_line
from ddplaunch.base.text import join_names, signal_name
from ddplaunch.base.types import (
    Count,
    ErrorText,
    ExitCode,
    JsonObject,
    Name,
    Pid,
    ShortText,
    Signal,
    Size,
    TailLines,
    Text,
    TextLine,
    Timestamp,
    as_dict,
)
from ddplaunch.core.signals import STOP_SIGNALS

MAX_HEADLINE_CHARS = 300  # of an exception's message in the headline
MAX_REPORT_CHARS = 1 << 20  # in a failure report, or in the last lines of a node's ranks: each must fit in one frame

_SIGNAL_MEANINGS = {
    "SIGABRT": "aborted: a check in native code failed, or the allocator found its heap broken",
    "SIGBUS": "bus error: memory that a file backs could not be provided",
    "SIGFPE": "arithmetic error in native code",
    "SIGILL": "illegal instruction: built for another processor?",
    "SIGKILL": "killed from outside",
    "SIGSEGV": "segmentation fault in native code",
    "SIGTERM": "terminated from outside",
}

OUT_OF_MEMORY = "out-of-memory killer"
"""In a failure's hint: the kernel killed the process for lack of memory."""

PROBABLY_OUT_OF_MEMORY = "probably out of memory"
"""In a failure's hint: the out-of-memory killer was active, but may have killed another process."""

# By these rules the first cause of an attempt is chosen:
# - A failure is secondary if its message is one of torch.distributed's about a peer that is gone or late, and it came
#   from there: its innermost frame is in torch (autograd's in a backward pass of DDP), or its class or the place in
#   torch's source is in the message. So a ConnectionResetError of an upload or a database is not secondary.
# - A failure in runtime.local_first is secondary if the first rank of the node, which others wait for, failed there.
# - An error of this machine's network (a port in use) is not secondary, whatever its class.
# - The first cause is the earliest failure that is not secondary. The machine waits a little for it
#   (SECONDARY_FAILURE_DELAY_S), because the rank that fails closes its connections before its end is noticed.
# - If all are secondary, timeouts come first: a rank that timed out has closed the others' connections by failing.
# - Only if all are secondary, ``JobSide.blame`` may name another rank, which ranks waited for. For a lost connection a
#   peer must have failed or left before, since otherwise no rank waited: the connection itself broke.
# - The lowest rank is named among equal failures.

_SECONDARY_ERROR = (
    r"(?i)connection (closed|reset|refused)|broken pipe|connectFullMesh|socket.*(closed|reset)|DistBackendError"
    r"|remote process has failed|NCCL communicator was aborted|recvValue failed|failed to recv|DistNetworkError"
    r"|Timed out (waiting|after) \d+|wait timeout after \d+|collective operation timeout|\[monitoredBarrier\]"
    r"|RuntimeError: (wait timeout|operation timed out!)|application timeout caused pair closure|DistStoreError"
)
"""Messages of torch.distributed in a rank whose peer has ended, or has not arrived."""

_LOCAL_ERROR = r"(?i)EADDRINUSE|EADDRNOTAVAIL|EACCES|address already in use|cannot assign requested address"
"""Messages of torch.distributed about this machine's own network."""

_TORCH_ERROR = r"Dist(Backend|Network|Store)Error|\[\S+\.(cc|cpp|h|hpp):\d+\]|\[monitoredBarrier\]|NCCL communicator"
"""What only torch's own errors have in their messages."""

_TORCH_FRAME = r'  File "[^"\n]*/torch/(distributed|autograd|nn/parallel)/[^"\n]*", line '

_FIRST_RANK_ERROR = "RuntimeError: runtime.local_first: the first rank of this node failed: "
"""What ``ddplaunch.runtime`` raises in ranks that have waited for another one, which has failed."""

_TORCH_SOURCE_PREFIX = r"\[/\S+:\d+\] "  # the place in torch's source with which its messages begin

_TIMED_OUT = r"(?i)timed out|timeout"


class RankFailure(Struct, frozen=True):
    """The unexpected end of a rank: with an exit code other than 0, or by a signal that ddplaunch did not send."""

    rank: Count
    local_rank: Count
    host: Name
    pid: Pid  # 0 if it could not be started
    attempt: Count
    exit_code: ExitCode | None  # either this or ``signal`` is set (128+N of the shell is ``shell_exit_code``)
    signal: Signal | None
    message: Text | None  # the exception's last line; None without a recorded exception
    traceback: Text | None  # as printed by Python, without torch's frames
    moment: Timestamp  # when the exception was caught, else when the launcher noticed the end
    hint: ShortText | None  # a cause from the kernel, or what to do: four lines at most
    refused: ErrorText | None = None  # ddplaunch's own error, found inside the rank: message and hint
    tail: TailLines = ()  # the last lines of its output
    collectives: Size | None = None  # how many it had entered; None: unknown, or none
    abort_reason: ShortText | None = None  # the sentence with which native code has aborted it

    def __post_init__(self) -> None:
        if (self.exit_code is None) is (self.signal is None) or self.exit_code == 0:
            raise ValueError(f"a failure with exit code {self.exit_code} and signal {self.signal}")

    @property
    def shell_exit_code(self) -> int:
        """The exit code as in a shell: its own, or 128 + the signal's number."""
        return self.exit_code if self.exit_code is not None else EXIT_SIGNAL + (self.signal or 0)

    @property
    def reason(self) -> str:
        """How the rank ended, in words: "was ended by SIGKILL (out of memory)"."""
        hint = self.hint or ""
        if self.signal == signal.SIGKILL and OUT_OF_MEMORY in hint:
            cause = PROBABLY_OUT_OF_MEMORY if PROBABLY_OUT_OF_MEMORY in hint else "out of memory"
            return f"was ended by SIGKILL ({cause})"
        if self.signal == signal.SIGABRT and self.abort_reason:
            return f"was ended by SIGABRT: {self.abort_reason}"
        return describe_exit(-self.signal if self.signal else self.exit_code or 0)

    @property
    def exception_text(self) -> str:
        """The traceback of the rank's exception, else its message; "" without an exception."""
        return self.traceback or self.message or ""

    @property
    def exception_type(self) -> str | None:
        """The type of the rank's exception: "ValueError"; None without a recorded traceback."""
        name = (self.message or "").partition("\n")[0].partition(":")[0].rpartition(".")[2].strip()
        return name if self.traceback and name.isidentifier() else None

    @property
    def was_ended_by_stop_signal(self) -> bool:
        """Whether a stop signal ended the rank: a scheduler sends such a signal to ranks too, which may end first."""
        return self.shell_exit_code - EXIT_SIGNAL in STOP_SIGNALS or self.exception_type == "KeyboardInterrupt"

    @property
    def headline(self) -> str:
        """Which rank failed and why, in one line."""
        if not self.pid and self.message:
            return f"{self.message} (exit code {self.exit_code})"
        message = (self.message or "").strip()
        if message and (self.signal is None or self.exception_type == "KeyboardInterrupt"):
            first = sanitize_line(message.splitlines()[0], MAX_HEADLINE_CHARS)
            return f"rank {self.rank} failed with {first} (exit code {self.shell_exit_code})"
        return f"rank {self.rank} {self.reason}"

    @property
    def is_secondary(self) -> bool:
        """Whether the rank failed only because another rank was gone."""
        return is_secondary_error(self.message or "", self.traceback or "")

    @property
    def is_timeout(self) -> bool:
        """Whether the rank failed because it waited too long for other ranks."""
        return bool(re.search(_TIMED_OUT, self.message or ""))

    @property
    def text_length(self) -> int:
        """The number of characters in the message, the traceback and the last lines of output."""
        return sum(map(len, (self.message or "", self.traceback or "", *self.tail)))

    @property
    def signature(self) -> tuple[object, ...]:
        """A value that is equal for ranks that failed in the same way at the same place."""
        frames = [line for line in (self.traceback or "").splitlines() if line.lstrip().startswith("File ")]
        return self.exit_code, self.signal, self.message, tuple(frames)

    def to_json(self) -> JsonObject:
        return {**as_dict(self), "reason": self.reason, "code": self.shell_exit_code}


class FailureReport(Struct, frozen=True):
    """The failure report of an attempt: the first cause, and all other failures."""

    first: RankFailure  # the first cause
    alike: tuple[Count, ...]  # ranks that failed in the same way
    others: tuple[RankFailure, ...]
    stopped: Count  # number of ranks that were stopped
    world_size: Count
    blame: TextLine | None = None  # the culprit: which rank the failed ones had waited for, and where it was

    def headline(self, *, several: bool) -> str:
        """Why the job ends, in one line; with ``several`` nodes, on which host."""
        return self.blame or self.first.headline + (f" (on {self.first.host})" if several else "")

    def to_json(self) -> JsonObject:
        """Return the content of failure.json."""
        others = [failure.to_json() for failure in self.others]
        return {**as_dict(self), "first": self.first.to_json(), "others": others}


class JobResult(Struct, frozen=True):
    """The result of the job: the launcher's exit code, and why if it is not 0."""

    code: ExitCode
    verdict: FailureReport | None = None
    usage_error: ErrorText | None = None  # message and hint of ddplaunch's own error
    remark: Text | None = None  # more for the user
    node: Name | None = None  # the host of a node whose check failed

    @property
    def failed_host(self) -> str | None:
        """The host of the node whose rank or check has failed; None if the job has not ended for such a reason."""
        return self.node or (self.verdict.first.host if self.verdict else None)

    def __post_init__(self) -> None:
        if self.code == 0 and (self.verdict or self.usage_error):
            raise ValueError("a failure with exit code 0")


def describe_exit(code: int) -> str:
    """Describe the end of a process; ``code`` as from os.waitstatus_to_exitcode: -N for signal N."""
    if code >= 0:
        return f"exited with code {code}"
    name = signal_name(-code)
    words = _SIGNAL_MEANINGS.get(name)
    return f"was ended by {name}" + (f" ({words})" if words else "")


def is_secondary_error(message: str, traceback: str) -> bool:
    """Whether an exception of torch.distributed only says that a peer is gone; without a traceback its message decides.

    The innermost frame of a traceback counts: frames of an upload may be below those of a checkpoint.
    """
    if message.startswith(_FIRST_RANK_ERROR):
        return True
    if not re.search(_SECONDARY_ERROR, message) or re.search(_LOCAL_ERROR, message):
        return False
    innermost = traceback[max(traceback.rfind('  File "'), 0) :]
    return not innermost or bool(re.search(_TORCH_ERROR, message) or re.match(_TORCH_FRAME, innermost))


def first_line(message: str, limit: int = 100) -> str:
    """The first line of an exception's message, at most ``limit`` characters of it."""
    first = message.strip().partition("\n")[0].removesuffix(":")
    return sanitize_line(re.sub(_TORCH_SOURCE_PREFIX, "… ", first), limit)


def limit_failure_texts(failures: Iterable[RankFailure], limit: int) -> Iterator[RankFailure]:
    """Yield failures with their full texts up to ``limit`` characters in total, the rest with one line each."""
    for failure in failures:
        limit -= failure.text_length
        if limit < 0:
            first = (failure.message or "").partition("\n")[0]
            failure = replace(
                failure, message=sanitize_line(first, 200) if failure.message else None, traceback=None, tail=()
            )
        yield failure


def find_first_cause(failures: Sequence[RankFailure], stopped: int, world_size: int) -> FailureReport:
    """Find the first cause: the earliest failure that is not a secondary one.

    If all are secondary, a timeout comes before lost connections: the rank that timed out closed them by failing.
    """

    def sort_key(failure: RankFailure) -> tuple[bool, bool, float]:
        return failure.is_secondary, failure.is_secondary and not failure.is_timeout, failure.moment

    ordered = sorted(failures, key=sort_key)
    first = ordered[0]
    first = min((each for each in ordered if each.signature == first.signature), key=lambda each: each.rank)
    alike = tuple(sorted(each.rank for each in ordered if each is not first and each.signature == first.signature))
    others = tuple(
        limit_failure_texts((each for each in ordered if each.signature != first.signature), MAX_REPORT_CHARS)
    )
    return FailureReport(first, alike, others, stopped, world_size)


def format_early_report(headline: str, grace: float, nodes: Sequence[str]) -> str:
    """Format the note on a failure while other ranks have up to ``grace`` seconds to stop, on these ``nodes``.

    ``nodes`` is empty in a job of one node. The note has only the beginning of the headline: the rank has printed its
    exception, and the report at the end has it in full.
    """
    wait = f"waiting up to {grace:g} s (--grace) for the other ranks" + (f" on {join_names(nodes)}" if nodes else "")
    return f"{headline.partition(': ')[0]}; {wait}"
