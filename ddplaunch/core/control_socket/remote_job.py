"""A job that was started from this machine and runs on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from ddplaunch.base.errors import host_name
from ddplaunch.core.rank.proc_utils import start_ticks


class RemoteJob(Struct, frozen=True):
    """A job on other machines, as recorded on the one that it was started from; a feature that starts some adds how."""

    run_id: str
    hosts: tuple[str, ...]  # the first is node 0
    python: str  # that runs ddplaunch on the hosts
    target: str
    cwd: str  # of the command that started it
    pid: int  # of that command
    ticks: int | None  # when that process started, see `start_ticks`
    host: str  # of that process
    began: float  # in seconds since the epoch
    ended: float | None = None
    code: int | None = None  # its exit code

    @property
    def is_running(self) -> bool:
        """Whether the command that started it still runs, as far as this machine knows."""
        is_remote = self.host != host_name()
        return self.ended is None and (is_remote or start_ticks(self.pid) == self.ticks)

    @property
    def state(self) -> str:
        """Its state in a word: running, lost, failed or done."""
        if self.ended is None:
            return "running" if self.is_running else "lost"
        return "failed" if self.code else "done"

    def start_command(self, words: Sequence[str], *, stdin: bool = True) -> Callable[[], int]:
        """Start ``ddplaunch WORDS`` on its first host; return a function that waits for its end and returns its code.

        ``stdin``: the command reads this process's stdin, which only one command at a time can.
        """
        raise NotImplementedError

    def format_command(self, words: Sequence[str]) -> str:
        """Return the shell command with which a user can run ``ddplaunch WORDS`` on its first host."""
        raise NotImplementedError

    def remove_record(self) -> None:
        """Forget the job."""
        raise NotImplementedError
