"""Every error that a user can meet, with its exit code and its hint; the CLI prints them and nothing else does.

Exit codes that the launcher itself chooses (the others are a rank's own):
"""

from __future__ import annotations

EXIT_USAGE = 2
"""A command that makes no sense, refused before anything starts (the shells' and click's convention)."""

EXIT_UNAVAILABLE = 69
"""A node could not be reached, never joined or was lost (EX_UNAVAILABLE of sysexits.h)."""

EXIT_PREEMPTED = 75
"""The job had to make room for another; the same may be tried again (EX_TEMPFAIL of sysexits.h)."""

EXIT_SIGNAL = 128
"""Added to the number of the signal that ended the job, as shells do: 130 is Ctrl-C, 143 SIGTERM, 137 SIGKILL."""


class LaunchError(Exception):
    """Something a user can mend: what was wrong, with the values compared, and what to type instead.

    Printed as at most three lines, never with a traceback of ours.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(LaunchError):
    """The command makes no sense as typed, on this machine; refused before anything starts."""

    exit_code = EXIT_USAGE
