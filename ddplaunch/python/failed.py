"""What a caller gets where a rank failed."""

from __future__ import annotations

from ddplaunch.errors import LaunchError


class RankFailed(LaunchError):
    """A rank has failed; the exception that it raised is the ``__cause__``.

    Attributes:
        rank: the first that failed on its own.
        host: the name of its machine.
        exit_code: its exit code; 128 + N where signal N ended it.
        signal: the number of that signal; None where it exited.
        report: the report as text, as ``ddplaunch run`` prints it.
    """

    def __init__(self, message: str, *, rank: int, host: str, exit_code: int, signal: int | None, report: str) -> None:
        super().__init__(message)
        self.rank, self.host, self.exit_code, self.signal, self.report = rank, host, exit_code, signal, report

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (self.message, self.rank, self.host, self.exit_code, self.signal, self.report)


def _again(message: str, rank: int, host: str, exit_code: int, signal: int | None, report: str) -> RankFailed:
    return RankFailed(message, rank=rank, host=host, exit_code=exit_code, signal=signal, report=report)


class RankTraceback(Exception):
    """The traceback of an exception that a rank raised, as text: tracebacks do not travel between processes."""

    def __str__(self) -> str:
        return f"in rank {self.args[0]}:\n{self.args[1]}"
